// Restoring: lists a run's checkpoints, finds the complete ones, and reads their bytes, each verified by its
// checksum before use. One thread.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/manifest.h"
#include "plan/state_catalogue.h"

namespace lm {

// Reads a checkpoint's state in any order; best ascending in each array, since then no chunk is read twice.
// `threads` threads, at least kReaders, read chunks with direct I/O and verify them.
class CheckpointReader : public StateReader {
 public:
  // Concurrent readers, so that the disk stays busy while others verify; each has a chunk of memory.
  static constexpr int kReaders = 4;

  // Throws as read_manifest does, and Error(22) if a file's header is corrupted.
  explicit CheckpointReader(std::string directory, int threads = 1);
  const Manifest& manifest() const { return manifest_; }
  const std::string& directory() const { return directory_; }
  const SavedArray* find(const std::string& array) const;  // its first part; null: absent
  void read(const std::string& array, int64_t offset, std::span<std::byte> bytes) override;
  void read(std::span<const Part> parts) override;
  // Verifies every byte of every file; throws Error(22) for corrupted ones.
  void verify();
  int64_t read_bytes() const { return read_bytes_; }  // of files, so far

 private:
  struct DirectFile {
    explicit DirectFile(const std::string& path);
    DirectFile(DirectFile&& other) noexcept : descriptor(std::exchange(other.descriptor, -1)) {}
    DirectFile& operator=(DirectFile&&) = delete;
    ~DirectFile();
    int descriptor;  // -1: its file system has no direct I/O
  };
  class Scratch;
  // The destination of a piece of a chunk.
  struct Piece {
    size_t file = 0;
    FileChunk chunk;
    int64_t skip = 0;  // bytes of the chunk before it
    std::span<std::byte> bytes;
  };
  // A cached chunk that was read in part: the next call continues in it.
  struct Kept {
    size_t file = 0;
    FileChunk chunk;
    std::shared_ptr<Scratch> memory;  // of the bytes
    std::span<std::byte> bytes;
  };
  static constexpr size_t kMostKept = 6;  // arrays read alternately: 24 MiB at most
  bool take_kept(const Piece& piece);
  void keep(const Piece& piece);
  void check_headers() const;
  void add_pieces(const Part& part, std::vector<Piece>& out) const;
  // Appends the pieces of a saved part from byte `offset` of it.
  void add_chunks(const SavedArray& saved, int64_t offset, std::span<std::byte> bytes,
                  std::vector<Piece>& out) const;
  void read_run(std::span<const Piece> run, Scratch& scratch) const;
  void read_pieces(std::span<const Piece> pieces) const;
  // Reads contiguous chunks.
  void read_chunks(size_t file, std::span<const FileChunk> chunks, std::span<std::byte> bytes) const;
  bool read_direct(size_t file, int64_t offset, std::span<std::byte> bytes) const;
  std::string directory_;
  Manifest manifest_;
  std::vector<File> files_;
  std::vector<Kept> kept_;                                        // least recently used first
  std::vector<DirectFile> direct_;                                // the same
  std::map<std::string, std::vector<const SavedArray*>> arrays_;  // the ranks' saved parts, in order
  int threads_;
  mutable std::atomic<int64_t> read_bytes_ = 0;
};

// The checkpoints in a directory, newest first. Those without a valid manifest have the problem.
struct FoundCheckpoint {
  std::string path;
  int64_t step = 0;
  std::optional<Manifest> manifest;
  std::string problem;
};
// Throws Error(21) for an existing directory that cannot be read, as interrupted_saves does.
std::vector<FoundCheckpoint> find_checkpoints(const std::string& directory);
// Names of interrupted saves ("step_00000100.tmp-1f..."): not checkpoints, and no longer in use.
std::vector<std::string> interrupted_saves(const std::string& directory);

// Deletes interrupted saves and all checkpoints except the `keep` newest complete ones and those in `kept`;
// never `newest`, which was just written. A failure to delete is a warning.
void retain_checkpoints(const std::string& directory, int64_t keep, int64_t newest,
                        const std::vector<int64_t>& kept);

}  // namespace lm
