#include "weights/verify.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "weights/adapter_files.h"
#include "weights/loader.h"
#include "weights/model_directory.h"

namespace lm {

void WeightsHash::Free::operator()(XXH3_state_s* state) const {
  XXH3_freeState(state);
}

WeightsHash::WeightsHash() : state_(XXH3_createState()) {
  LM_CHECK(state_ != nullptr && XXH3_128bits_reset(state_.get()) == XXH_OK, "XXH3");
}

void WeightsHash::add(const void* bytes, size_t n) {
  LM_CHECK(XXH3_128bits_update(state_.get(), bytes, n) == XXH_OK, "XXH3");
}

void WeightsHash::add(int64_t value) {
  add(&value, sizeof value);  // little-endian, like every supported machine
}

// Length first, so that no two lists of strings give the same bytes.
void WeightsHash::add(const std::string& text) {
  add(static_cast<int64_t>(text.size()));
  add(text.data(), text.size());
}

void WeightsHash::tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
  add(name);
  add(std::string(safetensors_dtype(dtype)));
  add(static_cast<int64_t>(shape.size()));
  for (const int64_t size : shape) add(size);
}

void WeightsHash::bytes(std::span<const std::byte> bytes) {
  add(bytes.data(), bytes.size());
}

std::string WeightsHash::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string weights_hash(const ModelFiles& files) {
  constexpr int64_t kChunk = int64_t{4} << 20;
  std::vector<std::byte> buffer(static_cast<size_t>(kChunk));
  WeightsHash hash;
  // In the order of the files' own names: it is these that other programs hash.
  std::vector<ModelFiles::Tensor> tensors = files.tensors();
  std::ranges::sort(
      tensors, {}, [](const ModelFiles::Tensor& tensor) -> const std::string& { return tensor.entry->name; });
  for (const ModelFiles::Tensor& tensor : tensors) {
    const SafetensorsEntry& entry = *tensor.entry;
    hash.tensor(entry.name, entry.dtype, entry.shape);
    for (int64_t offset = 0; offset < entry.bytes(); offset += kChunk) {
      const auto piece =
          std::span(buffer).first(static_cast<size_t>(std::min(kChunk, entry.bytes() - offset)));
      tensor.file->read(entry, offset, piece);
      hash.bytes(piece);
    }
  }
  return hash.hex();
}

VerifyResult verify_model(const std::string& directory, const FindBase& find_base) {
  VerifyResult result;
  try {
    std::error_code error;
    const bool adapter = std::filesystem::exists(directory + "/adapter_config.json", error);
    const ModelFiles files(directory, adapter ? kAdapterWeights : "");
    result.files = files.names();
    for (const ModelFiles::Tensor& tensor : files.tensors()) result.bytes += tensor.entry->bytes();
    result.tensors = static_cast<int64_t>(files.tensors().size());
    if (adapter) {
      const std::string name = read_adapter_config(directory, nullptr).base_model;
      const std::optional<ModelSpec> base = find_base ? find_base(name) : std::nullopt;
      if (base) check_adapter(directory, *base);
    } else {
      check_model_files(files, read_model_spec(directory));
    }
    result.weights_hash = weights_hash(files);
    result.ok = true;
  } catch (const Error& error) {
    if (error.code() == Exit::kInternal) throw;
    result.problem = error.report();
    result.code = error.code();
  }
  return result;
}

}  // namespace lm
