#include "plan/plan.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "plan/estimate.h"
#include "plan/multiples.h"
#include "plan/placement.h"
#include "plan/recompute_level.h"
#include "plan/refusal.h"
#include "plan/unit_pools.h"
#include "plan/weight_rows.h"
#include "plan/what_if.h"

namespace lm {
namespace {

std::optional<Choice> explain_freezing(const PlanInput& in, const SizedPlan& plan) {
  if (!in.trains() || in.config.train.only.empty()) return {};
  const ModelLayout& layout = in.layout;
  const int64_t first = plan.step.first_trained;
  return Choice{
      "trained parameters",
      fmt::format("{} of {}", layout.trainable_elements, layout.trainable_elements + layout.frozen_elements),
      "train.only; " + (first == 0
                            ? "the backward pass goes through every block"
                            : "no backward pass before " + layout.blocks[static_cast<size_t>(first)].name)};
}

// How much of the model experts are, and how much of it a token meets.
std::optional<Choice> explain_experts(const PlanInput& in) {
  const ExpertsSpec* experts = nullptr;
  int64_t layers = 0, of_experts = 0, met = 0;
  for (int64_t i = 0; i < in.spec.layer_count(); ++i) {
    const auto* const here = in.spec.layer(i).find<ExpertsSpec>();
    if (here == nullptr) continue;
    experts = here;
    ++layers;
    const auto add = [&](const Parameter& parameter) {
      if (!parameter.of_expert()) return;
      of_experts += parameter.elements();
      met += parameter.elements() * here->chosen / here->experts;
    };
    const BlockLayout& block = in.layout.blocks[static_cast<size_t>(i) + 1];
    for (const TensorPlace& place : block.tensors) add(place.parameter);
    for (const Parameter& parameter : block.elsewhere) add(parameter);
  }
  if (experts == nullptr) return {};
  const int64_t all = in.layout.trainable_elements + in.layout.frozen_elements;
  return Choice{"experts",
                fmt::format("{} of {} for each token, in {} of {} layers", experts->chosen, experts->experts,
                            layers, in.spec.layer_count()),
                fmt::format("they have {} of {} parameters, of which a token meets {}", of_experts, all,
                            all - of_experts + met)};
}

bool has_shards(const PlacementPlan& placement) {
  return placement.sharded || placement.pool(Pool::kWeights).shards > 1;
}

// Of zero.group = "machine" where it has no effect.
std::optional<Choice> explain_group(const PlanInput& in, const PlacementPlan& placement) {
  const World& world = in.world;
  if (!in.trains() || world.ranks == 1 || in.config.zero.group == ZeroGroup::kAll) return {};
  if (world.nodes > 1 && has_shards(placement)) return {};
  const char* why = "one machine has all ranks: the same as \"all\"";
  if (world.nodes > 1) why = "nothing is sharded";
  if (world.ranks == world.nodes) why = "one rank on each machine: nothing is sharded";
  return Choice{"zero.group", "machine", why};
}

// A step with shards inside each machine, if that is shorter.
std::optional<Choice> advise_group(const PlanInput& in, const Plan& plan) {
  constexpr double kWorthwhile = 0.98;
  const World& world = in.world;
  if (!in.trains() || !has_shards(plan.placement) || in.config.zero.group == ZeroGroup::kMachine) return {};
  if (world.nodes == 1 || !world.by_machine || world.ranks == world.nodes) return {};
  const auto machine =
      plan_with(in, {{{}, [](Config& c) { c.zero.group = ZeroGroup::kMachine; }}}, Estimated::kAll);
  if (!machine || !machine->plan.fits) return {};
  const Plan& other = machine->plan;
  if (other.step_seconds > kWorthwhile * plan.step_seconds) return {};
  const bool gpu = in.device == DeviceType::kCuda;
  const auto peak = [&](const Plan& of) { return format_bytes(gpu ? of.peak.device : of.peak.host); };
  return Choice{
      "zero.group", "all",
      fmt::format("a step with \"machine\" is estimated at {:.2f} s instead of {:.2f} s, with {} for each "
                  "rank instead of {}",
                  other.step_seconds, plan.step_seconds, peak(other), peak(plan))};
}

void add(const std::optional<Choice>& one, std::vector<Choice>& choices) {
  if (one) choices.push_back(*one);
}

void add(const std::vector<Choice>& more, std::vector<Choice>& choices) {
  choices.insert(choices.end(), more.begin(), more.end());
}

void set_cost(const PlanInput& in, Plan& plan) {
  static_cast<PlanCost&>(plan) = estimate(in, plan);
  plan.step.micro_batches = step_micro_batches(in, plan.numerics);
  plan.world = in.world;
}

}  // namespace

Plan place_plan(const PlanInput& in, bool estimated) {
  ChosenNumerics chosen = choose_numerics(in);
  SizedPlan plan = choose_placement(in, chosen.numerics);
  if (estimated) {
    for (const auto choose : {choose_recompute_level, choose_kept_norms}) {
      std::optional<LevelChoice> level = choose(in, plan);
      if (!level) continue;
      plan = std::move(level->plan);
      std::ranges::replace_if(
          chosen.choices, [&](const Choice& choice) { return choice.key == level->choice.key; },
          level->choice);
    }
  }
  plan.choices.insert(plan.choices.begin(), chosen.choices.begin(), chosen.choices.end());
  add(explain_freezing(in, plan), plan.choices);
  add(explain_experts(in), plan.choices);
  add(explain_streamed_experts(in, plan), plan.choices);
  add(explain_group(in, plan.placement), plan.choices);
  return {std::move(plan), {}, {}};
}

void estimate_plan(const PlanInput& in, Plan& plan) {
  set_cost(in, plan);
  add(explain_estimate(in, plan), plan.choices);
}

Plan draft_plan(const PlanInputs& inputs, const Machine& machine, const World& world, PlanPurpose purpose) {
  if (inputs.device == DeviceType::kCuda && machine.gpus.empty()) {
    throw Error(Exit::kDoesNotFit,
                {.area = "GPU-34",
                 .what = "the plan is for a GPU, and none is known",
                 .place = "",
                 .next = "--gpu-memory SIZE plans for an imagined one; --gpus 0 uses the CPU"});
  }
  const PlanInput in{inputs, machine, world, purpose};
  Plan plan = place_plan(in, true);
  if (!in.trains()) return plan;
  estimate_plan(in, plan);
  add(note_multiples(in, plan.numerics), plan.choices);
  return plan;
}

void estimate_again(const PlanInputs& inputs, const Machine& machine, Plan& plan) {
  set_cost({inputs, machine, plan.world, PlanPurpose::kTrain}, plan);
}

void refuse_idle_ranks(const World& world, const Config& config) {
  const int ranks = world.ranks;
  const int64_t sequences = config.train.global_batch;
  if (ranks <= sequences) return;
  throw Error(
      Exit::kConfig,
      {.area = "RANK-12",
       .what = fmt::format("{} ranks share train.global_batch = {} sequences: some would have nothing to do",
                           ranks, sequences),
       .place = fmt::format("{} ranks", ranks),
       .next = fmt::format("use at most {} ranks, or raise train.global_batch", sequences)});
}

void refuse_scattered_ranks(const World& world, const Config& config) {
  if (config.zero.group == ZeroGroup::kAll || world.by_machine) return;
  throw Error(Exit::kConfig,
              {.area = "RANK-12",
               .what = "zero.group = \"machine\" needs equally many ranks on every machine, numbered machine "
                       "by machine",
               .place = fmt::format("{} ranks", world.ranks),
               .next = "start them with mpirun --map-by slot, or srun --distribution=block, as many on each "
                       "machine, or set zero.group = \"all\""});
}

Plan make_plan(const PlanInputs& inputs, const Machine& machine, const World& world, PlanPurpose purpose) {
  if (purpose == PlanPurpose::kTrain) {
    refuse_idle_ranks(world, inputs.config);
    refuse_scattered_ranks(world, inputs.config);
  }
  Plan plan = draft_plan(inputs, machine, world, purpose);
  const PlanInput in{inputs, machine, world, purpose};
  if (!plan.fits) throw Error(Exit::kDoesNotFit, explain_refusal(in, plan));
  add(advise_group(in, plan), plan.choices);
  return plan;
}

}  // namespace lm
