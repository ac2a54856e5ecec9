// File access for the whole program: regular files only, every transfer complete or an error, new files and
// directories visible under their name only once they are complete and durable. Each object owns its
// descriptor; one thread at a time per object, but `read_at` may be called by many. Sizes in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lm {

// An existing regular file, open for reading. A FIFO, device, directory, dangling link or link loop is
// refused at once (O_NONBLOCK: opening a FIFO must not wait for its writer); a link to a regular file is
// fine. pread, not mmap: a file truncated under us must be an error, not a SIGBUS.
class File {
 public:
  // Throws Error(11) with the path and the reason; 21 if the disk or the process's limits are the cause.
  explicit File(const std::string& path);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened
  // Fills `bytes` from `offset`, or throws Error: 11 if the file ends before, 21 on an I/O error that
  // persists when it is retried.
  void read_at(int64_t offset, std::span<std::byte> bytes) const;

 private:
  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

// The whole of a regular file; refused (Error 11) before anything is allocated when it is larger than `cap`.
std::string read_small_file(const std::string& path, int64_t cap);

// A new file, written in order under a temporary name in the same directory; `commit` flushes it to the disk
// and renames it, replacing an existing file. Without `commit` nothing is left behind. Throws Error 20 if the
// disk is full, 21 on other failures.
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();
  int64_t size() const { return size_; }

 private:
  std::string path_;
  std::string temporary_;
  int fd_ = -1;
  int64_t size_ = 0;
};

void atomic_write_file(const std::string& path, std::string_view text);

// A new directory: fill `temporary()`, then `commit` renames it to its name. An existing directory of that
// name is an Error(14) at construction, unless it is empty or `replace` is set; a replaced one is exchanged
// in one step and then removed. Without `commit` nothing is left behind.
class NewDirectory {
 public:
  NewDirectory(const std::string& path, bool replace);
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  const std::string& temporary() const { return temporary_; }
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  bool replace_ = false;
};

// Makes the names in a directory durable.
void sync_directory(const std::string& path);

// Creates a directory of that mode and its missing parents, each with a durable name. Returns 0, or the errno
// of the failure.
int make_directories(const std::string& path, unsigned mode = 0777);

}  // namespace lm
