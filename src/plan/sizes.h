// The bytes of a plan: every class of a run's memory, given the numerics already chosen. Inside src/plan.
#pragma once

#include "plan/plan.h"

namespace lm {

// What a plan is made from; borrowed for the call.
struct PlanInput {
  const Config& config;
  const ModelSpec& spec;
  const AdapterSpec* adapter;  // null: full fine-tuning
  const ModelLayout& layout;
  const Machine& machine;
  DeviceType device;
  const DataShape& data;
  std::optional<bool> update_on_host = {};
};

PassShape pass_shape(const PlanInput& in, const Plan& plan);
// The most documents that a micro-batch can have.
int64_t micro_documents(const PlanInput& in, const NumericsPlan& numerics);

// Rows of the tensors of the longest micro-batch.
int64_t micro_rows(const PlanInput& in, const NumericsPlan& numerics);

// Fills arena, micro_tokens, micro_rows, classes, tiers, peak and fits from plan.numerics and plan.placement.
void size_plan(const PlanInput& in, Plan& plan);

// Whether the plan's memory would fit the machine with nothing else running: what numerics may depend on.
// Disks are left out: what is free on them never steers numerics.
bool fits_capacity(const Plan& plan);
// Whether its memory fits what is free now.
bool fits_memory(const Plan& plan);

}  // namespace lm
