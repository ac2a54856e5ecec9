#include "model/carried.h"

namespace lm {

Carried allocate_carried(const Context& context, int64_t rows, bool backward, bool train_inputs) {
  Carried out;
  for (const LayerSpec& layer : context.spec.layers) {
    const auto* const attention = layer.find<AttentionSpec>();
    Carried::Lent& lent = out.lent.emplace_back();
    if (attention == nullptr || !attention->lends) continue;
    lent.rows = context.tensor(rows, 2 * attention->kv_rows());
    if (backward) lent.gradient = context.tensor(rows, 2 * attention->kv_rows(), DType::kF32);
  }
  const InputsSpec& inputs = context.spec.embedding.inputs;
  if (inputs.width == 0) return out;
  out.inputs = context.tensor(rows, inputs.all());
  if (train_inputs) out.input_gradient = context.like(out.inputs);
  return out;
}

void zero_lent_gradients(const Context& context, const Carried& carried) {
  for (const Carried::Lent& lent : carried.lent)
    if (lent.gradient.defined()) context.kernels.zero(lent.gradient, context.stream);
}

}  // namespace lm
