// The named values of a GGUF file: what llama.cpp reads beside tensors, and the divisors of RoPE's
// frequencies that it has as tensors. Pure but for the tokenizer's files.
#pragma once

#include <string>
#include <vector>

#include "export/gguf.h"
#include "export/llama_cpp.h"
#include "spec/model_spec.h"

namespace lm {

struct GgufOptions {
  GgufType type = GgufType::kF16;
  std::string name;           // general.name
  std::string tokenizer_dir;  // holds tokenizer.json
  std::string chat_template;  // "": the directory's own
};

// Of a model that check_layers accepts.
GgufValues describe(const ModelSpec& spec, const LlamaCpp& arch, const GgufOptions& options);

struct RopeFactors {
  const char* name = "";  // of the tensor
  std::vector<float> divisors;
};
std::vector<RopeFactors> rope_factors(const ModelSpec& spec);

}  // namespace lm
