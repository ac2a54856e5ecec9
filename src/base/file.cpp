#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/error.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

std::string reason(int error) {
  return std::system_category().message(error);
}

[[noreturn]] void fail_input(const std::string& what, const std::string& path, const std::string& next) {
  throw Error(Exit::kInput, {.area = "FILE-21", .what = what, .place = path, .next = next});
}

// Retries of an interrupted call, and of a failed read: reading again changes nothing on the disk.
constexpr int kInterruptions = 30, kReadErrors = 3;

// Whether the machine, not the requested file, is the cause.
bool out_of_order(int error) {
  return error == EIO || error == ENOMEM || error == EMFILE || error == ENFILE || error == EINTR ||
         error == EAGAIN;
}

[[noreturn]] void fail_read(const std::string& operation, const std::string& place, int error) {
  throw Error(
      Exit::kIo,
      {.area = "IO-05", .what = operation + ": " + reason(error), .place = place, .next = "check the disk"});
}

[[noreturn]] void fail_write(const std::string& operation, const std::string& path, int error) {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  const char* const name = ::strerrorname_np(error);
  const char* const cure =
      error == EROFS
          ? "see in the kernel's log (dmesg) why that file system is read-only and make it writable again"
          : "check the disk and its permissions";
  throw Error(full ? Exit::kNoSpace : Exit::kIo,
              {.area = full ? "FILE-03" : "IO-05",
               .what = fmt::format("{}: {}: {}", operation, name == nullptr ? "errno" : name, reason(error)),
               .place = path,
               .next = full ? "free space there" : cure,
               .otherwise = full ? "choose another directory" : ""});
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// Unique among the processes and threads of this machine; O_EXCL catches the rest.
std::string temporary_name(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  return fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter.fetch_add(1));
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "not a regular file";
}

}  // namespace

File::File(const std::string& path) : path_(path) {
  if (path.find('\0') != std::string::npos)
    fail_input("a path with a NUL byte in it", path, "check the name");
  fd_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ < 0 && out_of_order(errno)) fail_read("cannot open", path, errno);
  if (fd_ < 0)
    fail_input("cannot open: " + reason(errno), path, "check that the file exists and is readable");
  struct stat info {};
  const int status = ::fstat(fd_, &info);
  if (status != 0 || !S_ISREG(info.st_mode)) {
    const std::string what =
        status != 0 ? "cannot stat: " + reason(errno)
                    : std::string("this is ") + kind_of(info.st_mode) + ", a regular file is needed";
    ::close(fd_);
    fail_input(what, path, "give a regular file, or a link to one");
  }
  size_ = info.st_size;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), fd_(other.fd_), size_(other.size_) {
  other.fd_ = -1;
}

void File::read_at(int64_t offset, std::span<std::byte> bytes) const {
  size_t done = 0;
  int interruptions = 0, errors = 0;  // since something was read
  while (done < bytes.size()) {
    const ssize_t n =
        ::pread(fd_, bytes.data() + done, bytes.size() - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR && ++interruptions <= kInterruptions) continue;
    if (n < 0 && errno == EIO && ++errors <= kReadErrors) continue;
    const std::string place = fmt::format("{}, offset {}", path_, offset + static_cast<int64_t>(done));
    if (n < 0) fail_read("read", place, errno);
    if (n == 0) {
      fail_input(fmt::format("the file ends early: {} of {} bytes read", done, bytes.size()), place,
                 "the file is truncated or still being written: get it again");
    }
    done += static_cast<size_t>(n);
    interruptions = errors = 0;
  }
}

std::string read_small_file(const std::string& path, int64_t cap) {
  const File file(path);
  if (file.size() > cap) {
    fail_input(fmt::format("the file has {} bytes, at most {} are accepted", file.size(), cap), path,
               "check that this is the right file");
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

NewFile::NewFile(const std::string& path) : path_(path), temporary_(temporary_name(path)) {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail_write("cannot create", path, errno);
}

NewFile::~NewFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void NewFile::write(std::span<const std::byte> bytes) {
  // The kernel moves at most 2 GiB per call; 256 MiB keeps the calls interruptible.
  constexpr size_t kMost = size_t{256} << 20;
  size_t done = 0;
  int interruptions = 0;  // since something was written
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd_, bytes.data() + done, std::min(bytes.size() - done, kMost));
    if (n < 0 && errno == EINTR && ++interruptions <= kInterruptions) continue;
    if (n <= 0) fail_write(fmt::format("write at offset {}", size_), path_, n < 0 ? errno : EIO);
    done += static_cast<size_t>(n);
    size_ += n;
    interruptions = 0;
  }
}

void NewFile::commit() {
  // An fsync that failed once must not be repeated: the kernel has dropped the pages.
  if (::fsync(fd_) != 0) fail_write("fsync", path_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_write("rename", path_, errno);
  ::close(fd_);
  fd_ = -1;
  sync_directory(parent_of(path_));
}

void atomic_write_file(const std::string& path, std::string_view text) {
  NewFile file(path);
  file.write(text);
  file.commit();
}

NewDirectory::NewDirectory(const std::string& path, bool replace) : path_(path), replace_(replace) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  std::error_code error;
  const bool exists = fs::exists(fs::symlink_status(path_, error));
  if (exists && (!fs::is_directory(path_, error) || (!replace && !fs::is_empty(path_, error)))) {
    throw Error(Exit::kIncompatible, {.area = "FILE-30",
                                      .what = "the output exists already and is not an empty directory",
                                      .place = path_,
                                      .next = "choose another name, or remove it",
                                      .kept = "what is there"});
  }
  if (const int failure = make_directories(parent_of(path_)); failure != 0)
    fail_write("cannot create the directory", parent_of(path_), failure);
  temporary_ = temporary_name(path_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) fail_write("cannot create the directory", temporary_, errno);
}

NewDirectory::~NewDirectory() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

void NewDirectory::commit() {
  sync_directory(temporary_);
  std::error_code error;
  const bool exchange = replace_ && fs::exists(path_, error) && !fs::is_empty(path_, error);
  if (exchange) {
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) != 0) {
      // File systems without the exchange (NFS): two renames; between them the name is briefly absent.
      const std::string old = temporary_name(path_);
      if (::rename(path_.c_str(), old.c_str()) != 0) fail_write("rename", path_, errno);
      if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
        const int failure = errno;
        ::rename(old.c_str(), path_.c_str());
        fail_write("rename", path_, failure);
      }
      temporary_ = old;
    }
  } else if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail_write("rename", path_, errno);
  }
  sync_directory(parent_of(path_));
  if (exchange) fs::remove_all(temporary_, error);
  temporary_.clear();
}

namespace {

// 0, or the errno.
int sync_names(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno;
  const int failure = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  // Some file systems cannot sync a directory and return EINVAL; there is nothing more to do there.
  return failure == EINVAL ? 0 : failure;
}

}  // namespace

void sync_directory(const std::string& path) {
  if (const int failure = sync_names(path); failure != 0) fail_write("fsync of the directory", path, failure);
}

int make_directories(const std::string& path, unsigned mode) {
  std::string plain = fs::path(path + "/").lexically_normal().parent_path().string();
  if (plain.empty()) plain = ".";  // the parent of "runs"
  std::error_code error;
  if (fs::is_directory(plain, error)) return 0;
  const std::string above = parent_of(plain);
  if (above != plain) {
    if (const int failure = make_directories(above); failure != 0) return failure;
  }
  // Another process may have created it and not synced it yet.
  if (::mkdir(plain.c_str(), mode) != 0) {
    if (errno != EEXIST) return errno;
    if (!fs::is_directory(plain, error)) return ENOTDIR;
  }
  return sync_names(above);
}

}  // namespace lm
