// How a run's frozen matrices are stored: as [model] says it, or as the files have them quantized. Pure.
#pragma once

#include "config/config.h"
#include "spec/encoding.h"

namespace lm {

// Null: as elements.
const Encoding* base_encoding(const ModelConfig& model);

// The same for files whose matrices are `stored` that way, which they stay: double_quantize counts for what
// is quantized here. Throws Error(10) where model.quantize asks for another type, or where no adapter is
// trained. (Experts in MXFP4 are dequantized then: null.)
const Encoding* base_encoding(const ModelConfig& model, EncodingKind stored, bool adapter);

}  // namespace lm
