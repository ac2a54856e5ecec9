#include "plan/sizes.h"

#include <algorithm>

namespace lm {

DryRuns::Key DryRuns::key(const PlanInput& in, const StepConfig& step, int64_t tokens, int64_t count) {
  return {&in.spec, &in.layout, in.adapter, step, tokens, count, in.trains()};
}

ArenaNeed DryRuns::arena(const PlanInput& in, const NumericsPlan& numerics, const StepConfig& of) {
  const StepConfig step = dry_run_step(of);
  const int64_t tokens = micro_tokens(in, numerics), documents = micro_documents(in, numerics);
  const auto [place, fresh] = arenas_.try_emplace(key(in, step, tokens, documents));
  if (fresh && in.trains()) place->second = arena_need(in.model(), step, tokens, documents);
  if (fresh && !in.trains())
    place->second = {.bytes = arena_need_forward(in.model(), step, tokens, documents)};
  return place->second;
}

int64_t DryRuns::gemm_shapes(const PlanInput& in, const NumericsPlan& numerics, const StepConfig& of) {
  StepConfig step = dry_run_step(of);
  step.group = 1;  // products are of one micro-batch, and of the second that adds to the first's
  const int64_t micro_batches = in.trains() ? std::min<int64_t>(numerics.micro_batches, 2) : 0;
  const int64_t tokens = micro_tokens(in, numerics);
  const auto [place, fresh] = gemm_shapes_.try_emplace(key(in, step, tokens, micro_batches));
  if (fresh) place->second = lm::gemm_shapes(in.model(), step, tokens, micro_batches);
  return place->second;
}

const std::vector<int64_t>& DryRuns::activations(const PlanInput& in, const PlacedPlan& plan) {
  const int64_t tokens = micro_tokens(in, plan.numerics), documents = micro_documents(in, plan.numerics);
  StepConfig step = dry_run_step(step_config(in.spec, in.layout, plan, tokens, in.config.optimizer.clip));
  step.group = 1;
  step.pools = {};
  step.first_trained = in.first_trained();
  const auto [place, fresh] = activations_.try_emplace(key(in, step, tokens, documents));
  if (fresh) place->second = offloaded_activations(in.model(), step, tokens, documents);
  return place->second;
}

}  // namespace lm
