#include "plan/plan.h"

#include <fmt/format.h>

#include "plan/forecast.h"
#include "plan/placement.h"
#include "plan/refusal.h"

namespace lm {

namespace {

// The first size of heads that the GPU cannot train; 0: none.
int64_t untrainable_heads(const ModelSpec& spec, const Gpu& gpu) {
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* const attention = layer.find<AttentionSpec>();
    if (attention != nullptr && !trains_heads_of(attention->head_dim, gpu.capability))
      return attention->head_dim;
  }
  return 0;
}

void refuse_heads(const PlanInputs& inputs, const Gpu& gpu) {
  const int64_t size = untrainable_heads(inputs.spec, gpu);
  if (size == 0) return;
  throw Error(
      Exit::kDoesNotFit,
      {.area = "GPU-34",
       .what = fmt::format("{} has compute capability {}, on which attention has no backward pass for "
                           "heads of {} numbers: not for 193 to 224",
                           gpu.name.empty() ? "the GPU" : gpu.name, gpu.capability.text(), size),
       .place = "config.json of the model: head_dim",
       .next = "use a card of 8.0, 9.0 or 10.0 (A100, H100, B200), or --gpus 0 for the CPU"});
}

}  // namespace

Plan place_plan(const PlanInput& in) {
  Plan plan;
  plan.numerics = choose_numerics(in, plan.choices);
  choose_placement(in, plan);
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
  if (in.device == DeviceType::kCuda && in.trains()) refuse_heads(inputs, machine.gpus.front());
  Plan plan = place_plan(in);
  if (in.trains()) forecast(in, plan);
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
