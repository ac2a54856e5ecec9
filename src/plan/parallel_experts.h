// zero.experts = "parallel" in a plan: what it is refused with, and what its ranks send to each other. How
// rows move is in train/rank_experts.h.
#pragma once

#include <optional>

#include "plan/plan.h"

namespace lm {

struct PlanInput;

// Of a training run.
ExpertShare expert_share(const Config& config, const World& world, int rank);

// Throws Error(10) for what a run with parallel experts cannot have.
void refuse_parallel_experts(const PlanInputs& in, const World& world);
// Whether there are experts, and equally many of every layer are each rank's.
bool divides_experts(const ModelSpec& spec, int ranks);

// Bytes of memory that a round of rows passes through on a rank; 0 where experts are not parallel.
int64_t expert_exchange_bytes(const ModelSpec& spec, const ExpertShare& share, DType dtype);

// What experts' rows add to a step's traffic, if every router chooses evenly; nothing where all ranks have
// all experts. `micro`: a micro-batch.
void add_expert_traffic(const PlanInput& in, const SizedPlan& plan, const StepConfig& step,
                        const StepWork& micro, RankTraffic& traffic);

// What a rank keeps and sends.
std::optional<Choice> explain_parallel_experts(const PlanInput& in, const Plan& plan);

}  // namespace lm
