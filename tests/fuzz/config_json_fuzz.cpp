// Any bytes as a model's config.json: refused with Error(11), or a spec whose sizes can be multiplied safely.
#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "spec/block_layout.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const lm::ModelSpec spec = lm::parse_model_spec({reinterpret_cast<const char*>(data), size}, "fuzz");
    if (spec.heads % spec.kv_heads != 0 || spec.layers.empty()) std::abort();
    for (const float f : lm::rope_frequencies(spec)) {
      if (!(f >= 0)) std::abort();
    }
    const lm::ModelLayout layout = lm::make_layout(spec, nullptr, lm::DType::kF32);
    if (layout.flat_elements < layout.trainable_elements || layout.trainable_elements <= 0) std::abort();
  } catch (const lm::Error& error) {
    if (error.code() != lm::Exit::kInput || error.report().size() > 8192) std::abort();
  }
  return 0;
}
