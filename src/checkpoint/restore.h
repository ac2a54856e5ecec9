// The way back: which checkpoints a run has, which of them are whole, and their bytes, each compared with its
// checksum before anyone uses it. One thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/manifest.h"
#include "plan/state_catalogue.h"

namespace lm {

// A checkpoint's state, in any order. Chunks are read and compared by `threads` threads.
class CheckpointReader : public StateReader {
 public:
  // Throws as read_manifest does, and Error(22) where a file's header is not as it was saved.
  explicit CheckpointReader(std::string directory, int threads = 1);
  const Manifest& manifest() const { return manifest_; }
  const std::string& directory() const { return directory_; }
  const SavedArray* find(const std::string& array) const;  // null: not there
  void read(const std::string& array, int64_t offset, std::span<std::byte> bytes) override;
  // Compares every byte of every file; what is wrong is thrown, Error(22).
  void verify();

 private:
  void check_headers() const;
  void read_chunk(size_t file, const FileChunk& chunk, std::span<std::byte> bytes) const;
  std::string directory_;
  Manifest manifest_;
  std::vector<File> files_;
  std::map<std::string, const SavedArray*> arrays_;
  int threads_;
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
