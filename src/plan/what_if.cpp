#include "plan/what_if.h"

#include <algorithm>
#include <utility>

#include "plan/adapter.h"
#include "plan/estimate.h"
#include "plan/parallel_experts.h"
#include "plan/placement.h"
#include "plan/planned_layout.h"
#include "plan/update_work.h"

namespace lm {
namespace {

double bits_of_each(int64_t bytes, int64_t elements) {
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(elements, 1));
}

const char* method_name(const PlanInput& in) {
  const Method method = in.config.train.method;
  if (method == Method::kFull) return "full";
  if (method == Method::kIa3) return "ia3";
  if (method == Method::kNorms) return "norms";
  if (method == Method::kPrefix) return "prefix";
  if (method == Method::kPrompt) return "prompt";
  if (method == Method::kPtuning) return "ptuning";
  const bool plain = in.config.model.quantize == Quantize::kNone && in.spec.stored == EncodingKind::kPlain;
  return plain ? "lora" : "qlora";
}

OtherModel other_model(const PlanInput& in, const Config& config) {
  OtherModel out;
  const bool lora = trains_adapter(config);
  if (lora) out.adapter = in.adapter != nullptr ? *in.adapter : configured_adapter(in.spec, config);
  out.layout =
      planned_layout(config, in.spec, lora ? &*out.adapter : nullptr, expert_share(config, in.world, 0));
  return out;
}

// Dry runs are shared as long as the adapter and the layout are: most settings change neither.
Alternative plan_of(const PlanInput& in, const Config& config, Estimated estimated,
                    std::optional<OtherModel>& kept) {
  const bool lora = trains_adapter(config);
  const DType dtype = storage_type(config.model.dtype);
  const bool same = lora == (in.adapter != nullptr) && config.model.dtype == in.config.model.dtype &&
                    config.model.quantize == in.config.model.quantize &&
                    config.zero.experts == in.config.zero.experts;
  if (!same && !kept) kept = other_model(in, config);
  const ModelLayout& layout = same ? in.layout : kept->layout;
  const AdapterSpec* const adapter = !lora ? nullptr : same ? in.adapter : &*kept->adapter;
  const PlanInput changed{{config, in.spec, adapter, layout, in.device, in.data},
                          in.machine,
                          in.world,
                          in.purpose,
                          same ? in.dry_runs : kept->dry_runs};

  Alternative out;
  out.config = config;
  // A refusal looks at too many ways to compare levels of each.
  out.plan = place_plan(changed, estimated == Estimated::kAll);
  const bool wanted = estimated == Estimated::kAll || (estimated == Estimated::kWhatFits && out.plan.fits);
  if (wanted && in.trains()) estimate_plan(changed, out.plan);
  out.method = method_name(changed);
  out.rule = rule_text(config.optimizer.name).name;
  out.weight_bits = lora ? bits_of_each(layout.frozen_bytes, layout.frozen_elements)
                         : 8.0 * static_cast<double>(dtype_size(dtype));
  out.state_bits = bits_of_each(state_bytes(layout, out.plan.numerics.state()), layout.flat_elements);
  return out;
}

}  // namespace

Config with_settings(Config config, const std::vector<Setting>& settings) {
  for (const Setting& setting : settings) {
    if (setting.apply) setting.apply(config);
  }
  return config;
}

std::optional<Alternative> plan_with(const PlanInput& in, const std::vector<Setting>& settings,
                                     Estimated estimated, std::optional<OtherModel>* kept) {
  std::optional<OtherModel> own;
  try {
    Alternative out =
        plan_of(in, with_settings(in.config, settings), estimated, kept != nullptr ? *kept : own);
    for (const Setting& setting : settings)
      out.settings.insert(out.settings.end(), setting.text.begin(), setting.text.end());
    return out;
  } catch (const Error& error) {
    if (error.code() == Exit::kInternal) throw;
    return std::nullopt;
  }
}

bool may_train_adapters(const Config& config) {
  return config.model.add_tokens.empty() || !config.lora.tokens.empty() || !config.lora.also.empty();
}

bool may_use_disk(const OffloadConfig& o) {
  const auto free_choice = [](OffloadTier tier_id) { return tier_id == OffloadTier::kAuto; };
  return o.paths.empty() && (free_choice(o.optimizer) || free_choice(o.gradients) || free_choice(o.weights) ||
                             free_choice(o.activations));
}

}  // namespace lm
