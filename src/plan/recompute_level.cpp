#include "plan/recompute_level.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>

#include "config/config_names.h"
#include "plan/estimate.h"

namespace lm {
namespace {

bool moves_anything(const Plan& plan) {
  return plan.step.uses_slots() || plan.placement.update_on_host || plan.placement.in_backward();
}

// The plan with another level, and the seconds of its step.
struct Candidate {
  Plan plan;
  double seconds = 0;
};
Candidate with_level(const PlanInput& in, const Plan& base, RecomputeChoice level) {
  Candidate out{base};
  out.plan.placement.recompute = level;
  choose_placement(in, out.plan);
  if (!out.plan.fits) return out;
  Plan timed = out.plan;
  estimate_plan(in, timed);
  out.seconds = timed.step_seconds;
  return out;
}

}  // namespace

std::string recompute_text(const RecomputeChoice& recompute) {
  return recompute.every > 1 ? fmt::format("1 block in {}", recompute.every) : recompute_name(recompute);
}

std::string saved_text(const RecomputeChoice& recompute) {
  if (recompute.whole()) return "block inputs";
  if (recompute.level == Recompute::kAttention) return "attention and the residual stream, of every block";
  if (recompute.every > 1)
    return fmt::format("saved by every block, but of 1 in {} its input alone", recompute.every);
  return "saved by every block";
}

std::vector<RecomputeChoice> recompute_levels() {
  constexpr Recompute kBlock = Recompute::kBlock;
  return {Recompute::kNone, Recompute::kAttention, {kBlock, 4}, {kBlock, 3}, {kBlock, 2}, kBlock};
}

void choose_recompute_level(const PlanInput& in, const Plan& base, Plan& plan) {
  if (!in.trains() || in.recorded != nullptr || !in.config.train.recompute.chosen_by_plan()) return;
  if (!plan.fits || (plan.recompute() == Recompute::kNone && !moves_anything(plan))) return;
  const RecomputeChoice first = plan.recompute();
  std::optional<Candidate> best;
  double first_seconds = 0;
  for (const RecomputeChoice level : recompute_levels()) {
    // A level that no block of the model has is another one's double.
    if (level.every > in.spec.layer_count()) continue;
    Candidate candidate = with_level(in, base, level);
    if (!candidate.plan.fits) continue;
    if (level == first) first_seconds = candidate.seconds;
    if (!best || candidate.seconds < best->seconds) best = std::move(candidate);
  }
  if (!best || best->plan.recompute() == first) return;
  plan = std::move(best->plan);
  for (Choice& choice : plan.choices) {
    if (choice.key != "train.recompute") continue;
    choice.value = recompute_name(plan.recompute());
    choice.reason = fmt::format("the shortest step of the levels that fit: {:.3g} s, {:.3g} s with \"{}\"",
                                best->seconds, first_seconds, recompute_name(first));
  }
}

}  // namespace lm
