// Any bytes as a checkpoint's manifest: refused with Error(11), Error(14) or Error(22), or a manifest that
// survives its text and whose places are inside of its files. With a first byte '1' the rest is a manifest up
// to its checksum, which is added, so that damage reaches what lies behind it.
#include "checkpoint/manifest.h"

#include "tests/fuzz/support.h"

namespace {

using lm::fuzz::require;

void check(const lm::Manifest& manifest) {
  __int128 bytes = 0;
  for (const lm::CheckpointFile& file : manifest.files) {
    require(!file.name.empty() && file.name != "." && file.name != ".." &&
            file.name.find('/') == file.name.npos);
    int64_t end = 0;
    for (const lm::FileChunk& chunk : file.chunks) {
      require(chunk.offset == end && chunk.bytes > 0);
      end += chunk.bytes;
    }
    require(end == file.bytes);
    bytes += file.bytes;
  }
  require(manifest.step >= 0 && manifest.bytes() == bytes);
  for (const lm::SavedArray& array : manifest.arrays) {
    require(array.file < manifest.files.size() && array.first >= 0 && array.elements >= 0 &&
            array.offset >= 0);
    require(array.bytes() <= manifest.files[array.file].bytes - array.offset);
  }
  for (const lm::SavedTensor& tensor : manifest.tensors) {
    require(tensor.block >= 0 && tensor.first >= 0);
    for (const int64_t size : tensor.shape) require(size >= 0);
  }
  const std::string text = lm::manifest_text(manifest);
  require(lm::manifest_text(lm::parse_manifest(text, "again")) == text);
}

// The three exits that refuse are one here.
lm::Manifest read(const std::string& text) {
  try {
    return lm::parse_manifest(text, "fuzz");
  } catch (const lm::Error& error) {
    const lm::Exit code = error.code();
    require(code == lm::Exit::kInput || code == lm::Exit::kIncompatible || code == lm::Exit::kIntegrity);
    throw lm::Error(lm::Exit::kInput, error.text());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string text(lm::fuzz::text_of(data + 1, size - 1));
  if (data[0] == '1') text += ",\n\"checksum\": \"" + lm::hash_text(text) + "\"\n}\n";
  const auto manifest = lm::fuzz::parse(lm::Exit::kInput, [&] { return read(text); });
  if (manifest) check(*manifest);
  return 0;
}
