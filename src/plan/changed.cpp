#include "plan/changed.h"

#include <algorithm>
#include <utility>

#include "plan/adapter.h"
#include "plan/base_encoding.h"
#include "plan/forecast.h"
#include "plan/placement.h"

namespace lm {
namespace {

double weight_bits(const ModelLayout& layout, DType dtype) {
  if (layout.frozen_elements == 0) return 8.0 * static_cast<double>(dtype_size(dtype));
  return 8.0 * static_cast<double>(layout.frozen_bytes) / static_cast<double>(layout.frozen_elements);
}

double state_bits(const ModelLayout& layout, const StateStreams& streams) {
  int64_t bytes = 0;
  for (const BlockLayout& block : layout.blocks) bytes += streams.bytes(block.count(0, block.flat_elements));
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(layout.flat_elements, 1));
}

}  // namespace

void pass_on_bug(const Error& error) {
  if (error.code() == Exit::kInternal) throw error;
}

bool may_use_disk(const OffloadConfig& o) {
  const auto free_choice = [](OffloadHome home) { return home == OffloadHome::kAuto; };
  return o.paths.empty() && (free_choice(o.optimizer) || free_choice(o.gradients) || free_choice(o.weights) ||
                             free_choice(o.activations));
}

std::optional<ChangedPlan> plan_changed(const PlanInput& in, const Config& config, Foretold foretold) {
  const bool lora = config.train.method == Method::kLora, had = in.adapter != nullptr;
  const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  const auto draft = [&](const AdapterSpec* adapter, const ModelLayout& layout) {
    const PlanInput changed{
        {config, in.spec, adapter, layout, in.device, in.data}, in.machine, in.world, in.purpose};
    Plan plan = place_plan(changed);
    const bool wanted = foretold == Foretold::kAll || (foretold == Foretold::kWhatFits && plan.fits);
    if (wanted && in.trains()) forecast(changed, plan);
    const double state = state_bits(layout, plan.numerics.state());
    return ChangedPlan{std::move(plan), weight_bits(layout, dtype), state};
  };
  try {
    if (lora == had && config.model.dtype == in.config.model.dtype &&
        config.model.quantize == in.config.model.quantize)
      return draft(in.adapter, in.layout);
    AdapterSpec fresh;
    if (lora && !had) fresh = configured_adapter(in.spec.names, config.lora);
    const AdapterSpec* const adapter = !lora ? nullptr : had ? in.adapter : &fresh;
    return draft(adapter, make_layout(in.spec, adapter, dtype,
                                      base_encoding(config.model, in.spec.stored, adapter != nullptr)));
  } catch (const Error& error) {
    pass_on_bug(error);
    return std::nullopt;
  }
}

}  // namespace lm
