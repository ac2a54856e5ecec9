// The description of a checkpoint: MANIFEST.json as a value. It lists every file with the checksums of all of
// its bytes, every array and tensor with its place, and the other state that a run needs to resume. Its own
// bytes end with their checksum, so that a flipped bit anywhere in a checkpoint is detected. Pure, except
// read_manifest.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/json.h"
#include "spec/block_layout.h"

namespace lm {

// The version of the format; checkpoints of later versions are refused.
inline constexpr int64_t kCheckpointVersion = 1;

// Consecutive bytes of a file, with their XXH3-64.
struct FileChunk {
  int64_t offset = 0, bytes = 0;
  uint64_t checksum = 0;
  int64_t end() const { return offset + bytes; }
};
struct CheckpointFile {
  std::string name;  // in the checkpoint's directory
  int64_t bytes = 0;
  std::vector<FileChunk> chunks;  // in order; they cover the file
  std::string hash() const;       // XXH3-128 of the chunks' checksums, 32 hex digits
};

// A flat array of the state's catalogue (plan/state_catalogue.h), or a rank's shard of it.
struct SavedArray {
  std::string name;
  DType dtype = DType::kF32;
  int64_t first = 0, elements = 0;  // of the whole array
  size_t file = 0;                  // index into the manifest's files
  int64_t offset = 0;               // into the file, bytes
  int64_t bytes() const { return elements * static_cast<int64_t>(dtype_size(dtype)); }
};
// A trained tensor of the Hugging Face files, in the arrays of its block.
struct SavedTensor {
  std::string name;
  int64_t block = 0, first = 0;  // element of the block's flat array
  std::vector<int64_t> shape;
};

struct Manifest {
  int64_t step = 0;
  std::vector<CheckpointFile> files;
  std::vector<SavedArray> arrays;
  std::vector<SavedTensor> tensors;
  std::map<std::string, int64_t> numbers;  // the catalogue's scalar entries: "optimizer.t"
  // Objects that this layer passes through: the trainer's state, the numerics, the configuration's keys as
  // text, and the identities of base model, tokenizer and data.
  Json run = Json::object(), numerics = Json::object(), config = Json::object(), sources = Json::object();
  int64_t bytes() const;  // of all files
};

// The trained tensors of a layout.
std::vector<SavedTensor> trained_tensors(const ModelLayout& layout);

std::string manifest_text(const Manifest& manifest);
// The limit of parse_manifest. Each of an array's 1,024 chunks takes some 80 bytes: 70 billion parameters in
// 80 blocks, saved by 64 ranks, take 20 MiB.
inline constexpr int64_t kMostManifestBytes = 256 << 20;
// Throws Error(22) for corrupted bytes, Error(11) for text that no version of lmlaunch has written, and
// Error(14) for a later version. `place` names the text in messages.
Manifest parse_manifest(std::string_view text, const std::string& place);
// Reads the manifest of a checkpoint's directory; also checks the step in its name, and the files' sizes.
Manifest read_manifest(const std::string& directory);

// "1f0e...": 16 and 32 hex digits of XXH3.
std::string checksum_text(uint64_t checksum);
std::string hash_text(std::string_view bytes);

}  // namespace lm
