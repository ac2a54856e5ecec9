// A trained model as one GGUF file, for llama.cpp and what is built on it. Matrices have the type that is
// asked for, vectors fp32; rows of q and k are in the order that its RoPE wants. The file appears under its
// name only when complete. One thread; errors: 11 for what llama.cpp does not know, 14 when the file exists,
// 20/21 on writing.
#pragma once

#include <string>

#include "export/gguf.h"
#include "export/weight_source.h"
#include "spec/model_spec.h"

namespace lm {

// Everything that a model may be that llama.cpp has no name for; checked before anything is read.
void check_gguf(const ModelSpec& spec, const std::string& output);

struct GgufOptions {
  GgufType type = GgufType::kF16;
  std::string name;           // general.name
  std::string tokenizer_dir;  // holds tokenizer.json
  std::string chat_template;  // "": the directory's own
};

// `layout` and `source` are of fp32.
void export_gguf(const std::string& output, const ModelSpec& spec, const ModelLayout& layout,
                 const WeightSource& source, const GgufOptions& options);

}  // namespace lm
