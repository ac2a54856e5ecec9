#include "plan/update_site.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "plan/cost_model.h"
#include "plan/estimate.h"
#include "plan/sizes.h"

namespace lm {
namespace {

// The share of the CPU at which it and the link, over which the GPU's part passes, need as long for a granule
// of all. `late`: the CPU begins so much later than the link, in the link's time for all of the state.
double balanced_share(const PlanInput& in, const PlacedPlan& plan, double late) {
  const double link = link_rates(in.machine, in.device).link;
  const double bandwidth = compute_rates(in.machine, DeviceType::kCpu, plan.numerics.dtype).bandwidth;
  const auto state = static_cast<double>(plan.placement.granule_bytes);
  const auto gradient = static_cast<double>(kGranule * size_of(plan.numerics.gradient_dtype)),
             weight = static_cast<double>(kGranule * size_of(plan.numerics.trained_dtype()));
  const double gpu = state / link;
  // What the CPU reads and writes; and its gradients and weights take their part of the link.
  const double cpu = std::max((gradient + 2 * (weight + state)) / bandwidth, (gradient + weight) / link);
  return gpu * (1 - late) / (gpu + cpu);
}

// `alone`, with the updates of `share` of the state by the CPU. Null: it does not fit, or shares nothing.
std::optional<SizedPlan> with_shared_updates(const PlanInput& in, const PlacedPlan& start,
                                             const TierChoice& tier_choice, const SizedPlan& alone,
                                             double share) {
  constexpr double kLeastShare = 0.1;
  if (share < kLeastShare || share > 1 - kLeastShare) return std::nullopt;
  PlacedPlan shared_start = start;
  shared_start.placement.update_on_host = true;
  shared_start.placement.host_share = share;
  SizedPlan out = place(in, shared_start, tier_choice, alone.placement.group);
  if (!fits_memory(out)) return std::nullopt;
  out = use_spare_memory(in, out);
  if (!out.fits || out.placement.pool(Pool::kOptimizer).slots == 0) return std::nullopt;
  return out;
}

// With state in host memory and all else on the GPU both may update: the CPU a part where it lies, the GPU
// the rest, whose state alone passes over the link. Same formula and order, hence the same bits. Null: that
// does not take a twentieth off the step that `alone` makes, where one of them updates all.
std::optional<SizedPlan> share_updates(const PlanInput& in, const PlacedPlan& start,
                                       const TierChoice& tier_choice, const SizedPlan& alone,
                                       const PlanCost& estimated) {
  constexpr double kWorthwhile = 0.95;
  const PlacementPlan& p = alone.placement;
  if (p.pool(Pool::kWeights).slots > 0 || p.pool(Pool::kGradients).slots > 0) return std::nullopt;
  if (in.update_on_host || in.world.ranks > 1) return std::nullopt;
  if (tier_choice.optimizer != TierId::kHost || tier_choice.in_backward) return std::nullopt;
  // All that it could save. (Most candidates end here, without a plan of their own.)
  const double seconds = estimated.step_seconds;
  const double passing = static_cast<double>(p.pool(Pool::kOptimizer).off_device_bytes(TierId::kHost)) /
                         link_rates(in.machine, in.device).link;
  if (2 * passing <= (1 - kWorthwhile) * seconds) return std::nullopt;
  // The CPU's part waits for the check. With many slots the link does not: it carries state all step long.
  const double late = (seconds - estimated.timeline.waiting_seconds) / passing;
  std::optional<SizedPlan> best;
  double least = kWorthwhile * seconds, chosen = 0;
  for (const double share : {balanced_share(in, alone, 0), balanced_share(in, alone, std::min(late, 1.0))}) {
    std::optional<SizedPlan> shared = with_shared_updates(in, start, tier_choice, alone, share);
    if (!shared) continue;
    const double both = estimate(in, *shared).step_seconds;
    if (both < least) best = std::move(shared), least = both, chosen = share;
  }
  if (best)
    best->choices.push_back(
        {"update of state off the GPU", "both",
         fmt::format("{:.3g} s per step, {:.3g} s if one of them did all: the CPU updates {:.0f} %", least,
                     seconds, 100 * chosen)});
  return best;
}

}  // namespace

SizedPlan choose_update_site(const PlanInput& in, const PlacedPlan& start, const TierChoice& tier_choice,
                             const SizedPlan& placed) {
  const char* const key = "update of state off the GPU";
  SizedPlan plan = use_spare_memory(in, placed);
  if (in.device != DeviceType::kCuda || tier_choice.optimizer == TierId::kDevice) return plan;
  if (is_muon(plan.numerics.rule)) {
    plan.choices.push_back({key, "gpu", "products have other bits on the CPU"});
    return plan;
  }
  PlacedPlan host_start = start;
  host_start.placement.update_on_host = true;
  SizedPlan on_host = place(in, host_start, tier_choice, placed.placement.group);
  if (!fits_memory(on_host)) return plan;
  on_host = use_spare_memory(in, on_host);
  if (!on_host.fits) return plan;
  if (!plan.fits && in.update_on_host.value_or(true)) {
    on_host.choices.push_back({key, "cpu", "takes less room on the disk"});
    return on_host;
  }
  const PlanCost by_gpu = estimate(in, plan), by_cpu = estimate(in, on_host);
  const double gpu = by_gpu.step_seconds, cpu = by_cpu.step_seconds;
  const bool host = in.update_on_host.value_or(cpu < gpu);
  if (auto shared = share_updates(in, start, tier_choice, host ? on_host : plan, host ? by_cpu : by_gpu))
    return *std::move(shared);
  const std::string reason = fmt::format("{:.3g} s per step, {:.3g} s if the {} did it", host ? cpu : gpu,
                                         host ? gpu : cpu, host ? "GPU" : "CPU");
  SizedPlan& chosen = host ? on_host : plan;
  chosen.choices.push_back({key, host ? "cpu" : "gpu", reason});
  return std::move(chosen);
}

}  // namespace lm
