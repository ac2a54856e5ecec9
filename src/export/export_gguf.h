// Exports a trained model as one GGUF file, for llama.cpp and programs built on it. Matrices have the
// requested type, vectors fp32; q, k and v, and gate and up, are joined or apart as its implementation of the
// architecture has them (export/llama_cpp.h), and where its RoPE turns other rows those of q and k are
// permuted. The file appears under its name only when complete. One thread; errors: 11 for a model that
// llama.cpp does not support, 14 if the file exists, 20/21 on writing.
#pragma once

#include <string>

#include "export/gguf_values.h"
#include "export/weight_source.h"
#include "spec/model_spec.h"

namespace lm {

// Throws for model features that llama.cpp does not support; called before anything is read.
void check_gguf(const ModelSpec& spec, const std::string& output);

// `layout` and `source` are of fp32.
void export_gguf(const std::string& output, const ModelSpec& spec, const ModelLayout& layout,
                 const WeightSource& source, const GgufOptions& options);

}  // namespace lm
