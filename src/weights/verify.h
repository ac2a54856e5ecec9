// One hash of a model's weights, and whether its files are whole. The hash is XXH3-128 over the tensors in
// name order (name, type, shape, bytes), so it does not depend on how a model is split into files. One
// thread; the errors of a damaged model are in the result, not thrown.
#pragma once

#include <string>
#include <vector>

#include "weights/model_files.h"

namespace lm {

struct VerifyResult {
  bool ok = false;
  std::string weights_hash;        // 32 hex digits; empty unless all was read
  std::vector<std::string> files;  // plain names, the index included
  int64_t tensors = 0;
  int64_t bytes = 0;    // of tensors
  std::string problem;  // the error's report when not ok
};

// Reads every byte. `directory` holds a model (checked against its config.json) or a PEFT adapter.
VerifyResult verify_model(const std::string& directory);

std::string weights_hash(const ModelFiles& files);

}  // namespace lm
