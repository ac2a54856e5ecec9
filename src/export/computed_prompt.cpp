#include "export/computed_prompt.h"

#include "base/error.h"
#include "weights/convert.h"
#include "weights/encoded_prompt.h"

namespace lm {
namespace {

// The elements of a tensor of block 0, whose rows a source has.
void read_elements(const WeightSource& source, const TensorPlace& place, int64_t first, int64_t elements,
                   float* out) {
  const int64_t columns = place.parameter.columns;
  for_each_view(source, 0, place, first / columns, (first + elements) / columns,
                [&](int64_t row, int64_t rows, const std::byte* from, DType dtype) {
                  float* const to = out + (row * columns - first);
                  convert_elements(from, dtype, reinterpret_cast<std::byte*>(to), DType::kF32,
                                   rows * columns);
                });
}

}  // namespace

AdapterSpec ComputedPrompt::spec_of(const AdapterSpec& adapter) {
  AdapterSpec out = adapter;
  out.encoder = 0;
  out.encoded = true;
  return out;
}

ComputedPrompt::ComputedPrompt(const ModelSpec& model, const AdapterSpec& adapter, const ModelLayout& layout,
                               const WeightSource& source)
    : spec_(spec_of(adapter)), layout_(make_layout(model, &spec_, DType::kF32)) {
  const BlockLayout& block = layout.blocks.front();
  values_ =
      encoded_prompt({.tokens = adapter.virtual_tokens, .width = model.hidden, .hidden = adapter.encoder},
                     [&](const std::string& name, int64_t first, int64_t elements, float* out) {
                       for (const Trainable& entry : block.trainables) {
                         const TensorPlace& place = block.tensors[entry.tensor];
                         if (place.parameter.parts.front().name == name)
                           return read_elements(source, place, first, elements, out);
                       }
                       LM_CHECK(false, name);
                     });
}

WeightSource ComputedPrompt::source() const {
  return [this](size_t, const TensorPlace&, int64_t) {
    return WeightView{reinterpret_cast<const std::byte*>(values_.data()), DType::kF32};
  };
}

}  // namespace lm
