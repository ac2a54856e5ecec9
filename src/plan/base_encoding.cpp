#include "plan/base_encoding.h"

#include <string>

#include "base/error.h"
#include "config/config_text.h"

namespace lm {
namespace {

Quantize type_of(EncodingKind kind) {
  if (kind == EncodingKind::kPlain) return Quantize::kNone;
  if (kind == EncodingKind::kInt8) return Quantize::kInt8;
  return is_fp4(kind) ? Quantize::kFp4 : Quantize::kNf4;
}

[[noreturn]] void refuse(const std::string& what, const std::string& next) {
  throw setting_error(what, "model.path", next);
}

// Of experts in MXFP4, which are dequantized where they are trained.
const Encoding* microscaled(const ModelConfig& model, bool adapter) {
  if (!adapter) return nullptr;
  if (model.quantize != Quantize::kNone)
    refuse(
        "the model's experts are quantized (\"mxfp4\"), and model.quantize = " + value_text(model.quantize),
        "set train.method = \"lora\" and leave model.quantize out: the experts keep their 4 bits");
  return &encoding_of(EncodingKind::kMxfp4);
}

}  // namespace

const Encoding* base_encoding(const ModelConfig& model) {
  const bool twice = model.double_quantize;
  switch (model.quantize) {
    case Quantize::kNf4:
      return &encoding_of(twice ? EncodingKind::kNf4Double : EncodingKind::kNf4);
    case Quantize::kFp4:
      return &encoding_of(twice ? EncodingKind::kFp4Double : EncodingKind::kFp4);
    case Quantize::kInt8:
      return &encoding_of(EncodingKind::kInt8);
    default:
      return nullptr;
  }
}

const Encoding* base_encoding(const ModelConfig& model, EncodingKind stored, bool adapter) {
  if (stored == EncodingKind::kPlain) return base_encoding(model);
  if (stored == EncodingKind::kMxfp4) return microscaled(model, adapter);
  const Quantize type = type_of(stored);
  const std::string files = "the model's weights are quantized (" + value_text(type) + ")";
  if (!adapter)
    refuse(files + ", and quantized weights cannot be trained",
           "set train.method = \"qlora\", or use the model's bf16, fp16 or fp32 version");
  if (model.quantize != Quantize::kNone && model.quantize != type)
    refuse(files + ", and model.quantize = " + value_text(model.quantize),
           "leave model.quantize out, or set it to " + value_text(type));
  return &encoding_of(stored);
}

}  // namespace lm
