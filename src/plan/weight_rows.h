// The rows of weights in a plan's table of bytes. What experts have of them has rows of its own: it is most
// of a mixture's memory, and little of its work.
#pragma once

#include <optional>

#include "plan/class_table.h"

namespace lm {

// What experts have of a block.
struct ExpertBytes {
  int64_t trained = 0;  // elements of the flat array
  int64_t frozen = 0;   // bytes
};
ExpertBytes expert_bytes(const BlockLayout& block);

// Trained and frozen weights, and those of experts.
void add_weights(const PlanInput& in, const PlacedPlan& plan, ClassTable& table);

// The part of the experts that `tokens` tokens meet, if each chooses evenly: 1 - (1 - k/E)^T.
double expected_expert_share(const ExpertsSpec& spec, double tokens);

// Whether frozen experts off the device are fetched once the router has chosen, for `tokens` tokens at once
// (where ranks divide the experts, of all of them). Compute waits for these, while a whole block is fetched
// ahead: worth it where at most half is expected.
bool fetches_by_routing(const ExpertsSpec& spec, int64_t tokens);
// Registered host memory in which a GPU's step reads what a layer's router has chosen; 0 without experts.
int64_t router_result_bytes(const ModelSpec& spec);
// Whether a step fetches experts of that unit, a transformer block, so.
bool routes_experts(const SizedPlan& plan, int64_t unit, const ExpertsSpec& spec, const ExpertShare& share);

// What a pass of a group of micro-batches is expected to need of experts whose weights are off the device.
// Nothing where none are.
std::optional<Choice> explain_streamed_experts(const PlanInput& in, const SizedPlan& plan);

}  // namespace lm
