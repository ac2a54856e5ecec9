// The way back: which checkpoints a run has, which of them are whole, and their bytes, each compared with its
// checksum before anyone uses it. One thread.
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

// A checkpoint's state, in any order; best ascending in each array, as then no chunk is read twice. Chunks
// are read past the page cache, and compared, by `threads` threads, at least kReaders.
class CheckpointReader : public StateReader {
 public:
  // Under way at once, so that a disk is kept busy while others compare; each has a chunk of memory.
  static constexpr int kReaders = 4;

  // Throws as read_manifest does, and Error(22) where a file's header is not as it was saved.
  explicit CheckpointReader(std::string directory, int threads = 1);
  const Manifest& manifest() const { return manifest_; }
  const std::string& directory() const { return directory_; }
  const SavedArray* find(const std::string& array) const;  // its first part; null: not there
  void read(const std::string& array, int64_t offset, std::span<std::byte> bytes) override;
  void read(std::span<const Part> parts) override;
  // Compares every byte of every file; what is wrong is thrown, Error(22).
  void verify();
  int64_t read_bytes() const { return read_bytes_; }  // of files, so far

 private:
  struct DirectFile {
    explicit DirectFile(const std::string& path);
    DirectFile(DirectFile&& other) noexcept : descriptor(std::exchange(other.descriptor, -1)) {}
    DirectFile& operator=(DirectFile&&) = delete;
    ~DirectFile();
    int descriptor;  // -1: its file system has no direct transfers
  };
  class Scratch;
  // Where a piece of a chunk goes.
  struct Piece {
    size_t file = 0;
    FileChunk chunk;
    int64_t skip = 0;  // bytes of the chunk before it
    std::span<std::byte> bytes;
  };
  // A chunk of which a part was asked for: the next call begins in it.
  struct Kept {
    size_t file = 0;
    FileChunk chunk;
    std::shared_ptr<Scratch> memory;  // of the bytes
    std::span<std::byte> bytes;
  };
  static constexpr size_t kMostKept = 6;  // arrays that are read in turns: 24 MiB at most
  bool take_kept(const Piece& piece);
  void keep(const Piece& piece);
  void check_headers() const;
  void add_pieces(const Part& part, std::vector<Piece>& out) const;
  // Bytes of a saved part from byte `offset` of it.
  void add_chunks(const SavedArray& saved, int64_t offset, std::span<std::byte> bytes,
                  std::vector<Piece>& out) const;
  void read_run(std::span<const Piece> run, Scratch& scratch) const;
  void read_pieces(std::span<const Piece> pieces) const;
  // Neighbours.
  void read_chunks(size_t file, std::span<const FileChunk> chunks, std::span<std::byte> bytes) const;
  bool read_direct(size_t file, int64_t offset, std::span<std::byte> bytes) const;
  std::string directory_;
  Manifest manifest_;
  std::vector<File> files_;
  std::vector<Kept> kept_;                                        // longest unused first
  std::vector<DirectFile> direct_;                                // the same
  std::map<std::string, std::vector<const SavedArray*>> arrays_;  // parts, as ranks have saved them, in order
  int threads_;
  mutable std::atomic<int64_t> read_bytes_ = 0;
};

// What is in a directory of checkpoints, newest first. Those that have no whole manifest say why.
struct FoundCheckpoint {
  std::string path;
  int64_t step = 0;
  std::optional<Manifest> manifest;
  std::string problem;
};
// Throws Error(21) for a directory that is there and cannot be read, as interrupted_saves does.
std::vector<FoundCheckpoint> find_checkpoints(const std::string& directory);
// Names of saves that were interrupted ("step_00000100.tmp-1f..."): no checkpoints, and nobody's any more.
std::vector<std::string> interrupted_saves(const std::string& directory);

// Deletes what is neither one of the `keep` newest whole checkpoints nor in `kept`, and interrupted saves;
// never `newest`, which was just written. A failure to delete is a warning.
void retain_checkpoints(const std::string& directory, int64_t keep, int64_t newest,
                        const std::vector<int64_t>& kept);

}  // namespace lm
