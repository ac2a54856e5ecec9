#include "plan/plan.h"

#include <fmt/format.h>

#include "plan/forecast.h"
#include "plan/multiples.h"
#include "plan/placement.h"
#include "plan/recompute_level.h"
#include "plan/refusal.h"

namespace lm {
namespace {

void explain_freezing(const PlanInput& in, Plan& plan) {
  if (!in.trains() || in.config.train.only.empty()) return;
  const ModelLayout& layout = in.layout;
  const int64_t first = plan.step.first_trained;
  plan.choices.push_back(
      {"trained parameters",
       fmt::format("{} of {}", layout.trainable_elements, layout.trainable_elements + layout.frozen_elements),
       "train.only; " + (first == 0
                             ? "the backward pass goes through every block"
                             : "no backward pass before " + layout.blocks[static_cast<size_t>(first)].name)});
}

// How much of the model experts are, and how much of it a token meets.
void explain_experts(const PlanInput& in, Plan& plan) {
  const ExpertsSpec* experts = nullptr;
  int64_t layers = 0, of_experts = 0, met = 0;
  for (int64_t i = 0; i < in.spec.layer_count(); ++i) {
    const auto* const here = in.spec.layer(i).find<ExpertsSpec>();
    if (here == nullptr) continue;
    experts = here;
    ++layers;
    for (const TensorPlace& place : in.layout.blocks[static_cast<size_t>(i) + 1].tensors) {
      if (!place.parameter.of_expert) continue;
      of_experts += place.parameter.elements();
      met += place.parameter.elements() * here->chosen / here->experts;
    }
  }
  if (experts == nullptr) return;
  const int64_t all = in.layout.trainable_elements + in.layout.frozen_elements;
  plan.choices.push_back({"experts",
                          fmt::format("{} of {} for each token, in {} of {} layers", experts->chosen,
                                      experts->experts, layers, in.spec.layer_count()),
                          fmt::format("they have {} of {} parameters, of which a token meets {}", of_experts,
                                      all, all - of_experts + met)});
}

Plan with_numerics(const PlanInput& in) {
  Plan plan;
  plan.numerics = choose_numerics(in, plan.choices);
  return plan;
}

}  // namespace

Plan place_plan(const PlanInput& in, bool foretold) {
  const Plan numerics = with_numerics(in);
  Plan plan = numerics;
  choose_placement(in, plan);
  if (foretold) choose_recompute_level(in, numerics, plan);
  explain_freezing(in, plan);
  explain_experts(in, plan);
  return plan;
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
  forecast(in, plan);
  note_multiples(in, plan);
  return plan;
}

void foretell_again(const PlanInputs& inputs, const Machine& machine, Plan& plan) {
  const std::vector<Choice> choices = plan.choices;  // a forecast says what it has assumed
  forecast({inputs, machine, plan.world, PlanPurpose::kTrain}, plan);
  plan.choices = choices;
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

Plan make_plan(const PlanInputs& inputs, const Machine& machine, const World& world, PlanPurpose purpose) {
  if (purpose == PlanPurpose::kTrain) refuse_idle_ranks(world, inputs.config);
  Plan plan = draft_plan(inputs, machine, world, purpose);
  if (!plan.fits) throw Error(Exit::kDoesNotFit, explain_refusal({inputs, machine, world, purpose}, plan));
  return plan;
}

}  // namespace lm
