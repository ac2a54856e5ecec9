#include "plan/recompute_level.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>

#include "config/config_names.h"
#include "plan/estimate.h"

namespace lm {
namespace {

bool moves_anything(const SizedPlan& plan) {
  return plan.step.uses_slots() || plan.placement.update_on_host || plan.placement.in_backward();
}

}  // namespace

std::string recompute_text(const RecomputeChoice& recompute) {
  return recompute.every > 1 ? fmt::format("1 block in {}", recompute.every) : recompute_name(recompute);
}

std::string saved_text(const RecomputeChoice& recompute, bool keep_norms) {
  if (recompute.whole()) return "block inputs";
  if (recompute.level == Recompute::kAttention) return "attention and the residual stream, of every block";
  if (recompute.every > 1)
    return fmt::format("saved by every block, but of 1 in {} its input alone", recompute.every);
  return keep_norms ? "saved by every block, outputs of norms too" : "saved by every block";
}

std::vector<RecomputeChoice> recompute_levels() {
  constexpr Recompute kBlock = Recompute::kBlock;
  return {Recompute::kNone, Recompute::kAttention, {kBlock, 4}, {kBlock, 3}, {kBlock, 2}, kBlock};
}

std::optional<LevelChoice> choose_recompute_level(const PlanInput& in, const SizedPlan& plan) {
  if (!in.trains() || in.recorded != nullptr || !in.config.train.recompute.chosen_by_plan()) return {};
  if (!plan.fits || (plan.recompute() == Recompute::kNone && !moves_anything(plan))) return {};
  const RecomputeChoice first = plan.recompute();
  std::optional<SizedPlan> best;
  double best_seconds = 0, first_seconds = 0;
  for (const RecomputeChoice level : recompute_levels()) {
    // A level that no block of the model has is another one's double.
    if (level.every > in.spec.layer_count()) continue;
    SizedPlan candidate = choose_placement(in, plan.numerics, level);
    if (!candidate.fits) continue;
    const double seconds = estimate(in, candidate).step_seconds;
    if (level == first) first_seconds = seconds;
    if (!best || seconds < best_seconds) best = std::move(candidate), best_seconds = seconds;
  }
  if (!best || best->recompute() == first) return {};
  const std::string level = recompute_name(best->recompute());
  return LevelChoice{std::move(*best),
                     {"train.recompute", level,
                      fmt::format("the shortest step of the levels that fit: {:.3g} s, {:.3g} s with \"{}\"",
                                  best_seconds, first_seconds, recompute_name(first))}};
}

std::optional<LevelChoice> choose_kept_norms(const PlanInput& in, const SizedPlan& plan) {
  if (!in.trains() || in.device != DeviceType::kCuda || !in.config.train.recompute.chosen_by_plan())
    return {};
  if (!plan.fits || plan.recompute() != Recompute::kNone || moves_anything(plan)) return {};
  SizedPlan kept = plan;
  kept.placement.keep_norms = true;
  static_cast<PlanSizes&>(kept) = size_plan(in, kept);
  if (!kept.fits) return {};
  const double seconds = estimate(in, kept).step_seconds, without = estimate(in, plan).step_seconds;
  if (seconds >= without) return {};
  return LevelChoice{
      std::move(kept),
      {"train.recompute", recompute_name(Recompute::kNone),
       fmt::format("saved activations fit, outputs of norms too: {:.4g} s, {:.4g} s without these", seconds,
                   without)}};
}

}  // namespace lm
