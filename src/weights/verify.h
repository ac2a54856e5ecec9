// A hash of a model's weights, and a check that its files are complete. The hash is XXH3-128 over the tensors
// in name order (name, type, shape, bytes), so it does not depend on how a model is split into files. One
// thread; the errors of a damaged model are in the result, not thrown.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "spec/model_spec.h"
#include "weights/model_files.h"

struct XXH3_state_s;

namespace lm {

struct VerifyResult {
  bool ok = false;
  std::string weights_hash;        // 32 hex digits; empty unless all was read
  std::vector<std::string> files;  // plain names, the index included
  int64_t tensors = 0;
  int64_t bytes = 0;        // of tensors
  std::string problem;      // the error's report when not ok
  Exit code = Exit::kDone;  // the error's
};

// The spec of an adapter's base model; nullopt if it is not available.
using FindBase = std::function<std::optional<ModelSpec>(const std::string& name)>;

// Reads every byte. `directory` holds a model, which is checked against its config.json, or a PEFT adapter,
// which is checked against its base if `find_base` finds it.
VerifyResult verify_model(const std::string& directory, const FindBase& find_base = {});

std::string weights_hash(const ModelFiles& files);

// The same hash from other sources: tensors in name order, the bytes of each after its name, in chunks of any
// size.
class WeightsHash {
 public:
  WeightsHash();
  void tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape);
  void bytes(std::span<const std::byte> bytes);
  std::string hex() const;

 private:
  void add(const void* bytes, size_t n);
  void add(int64_t value);
  void add(const std::string& text);
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace lm
