#include "weights/verify.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "weights/adapter_files.h"
#include "weights/loader.h"

namespace lm {

class WeightsHash::State {
 public:
  State() : state_(XXH3_createState()) {
    LM_CHECK(state_ != nullptr && XXH3_128bits_reset(state_.get()) == XXH_OK, "XXH3");
  }
  void add(const void* bytes, size_t n) {
    LM_CHECK(XXH3_128bits_update(state_.get(), bytes, n) == XXH_OK, "XXH3");
  }
  void add(int64_t value) { add(&value, sizeof value); }  // little-endian, as every machine here
  // Length first, so that no two lists of strings give the same bytes.
  void add(const std::string& text) {
    add(static_cast<int64_t>(text.size()));
    add(text.data(), text.size());
  }
  std::string hex() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
    return text;
  }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

WeightsHash::WeightsHash() : state_(std::make_unique<State>()) {}
WeightsHash::~WeightsHash() = default;

void WeightsHash::tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
  state_->add(name);
  state_->add(safetensors_dtype(dtype));
  state_->add(static_cast<int64_t>(shape.size()));
  for (const int64_t size : shape) state_->add(size);
}

void WeightsHash::bytes(std::span<const std::byte> bytes) {
  state_->add(bytes.data(), bytes.size());
}

std::string WeightsHash::hex() const {
  return state_->hex();
}

std::string weights_hash(const ModelFiles& files) {
  constexpr int64_t kChunk = int64_t{4} << 20;
  std::vector<std::byte> buffer(static_cast<size_t>(kChunk));
  WeightsHash hash;
  for (const ModelFiles::Tensor& tensor : files.tensors()) {
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
