// The half of a plan that decides the bits of a result. It depends on config, spec and the machine's
// capacities alone, not on what a run is for, on what is free now or on how fast anything is; it is recorded
// with the run, and a later start of the run adopts it, whatever the machine then looks like. The level of
// recomputation changes no bit: a placement may have another one (Plan::recompute), which is recorded then.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "schedule/step_config.h"

namespace lm {

struct PlanInput;  // sizes.h

struct NumericsPlan : Arithmetic {
  int64_t micro_batch = 1;                       // sequences
  int64_t micro_batches = 1;                     // per step
  RecomputeChoice recompute = Recompute::kNone;  // never kAuto
  Master master = Master::kSplit;                // of bf16 weights; fp32 weights are their own
  RuleId rule = {};                              // of the optimizer
  bool stateless = false;                        // it has no state, by its settings
  std::string kernel_set = "cpu";                // the device and its instruction set or kind
  std::string libraries = {};  // that compute beside our kernels, with their versions; "" not known
  int ranks = 1;
  int machine_ranks = 1;  // whose gradients are added up first, before those of other machines
  // With one rank to a machine, or one machine, sums are those of all ranks in their order.
  bool two_levels() const { return machine_ranks > 1 && machine_ranks < ranks; }
  // Without its rounding, which changes no size.
  MasterForm form() const { return master_form(rule, master, trained_dtype()); }
  StateTensors state() const { return {rule, form(), stateless}; }
  bool operator==(const NumericsPlan&) const = default;
};

struct Choice {
  std::string key, value, reason;
};

// With how each `auto` was resolved.
struct ChosenNumerics {
  NumericsPlan numerics;
  std::vector<Choice> choices = {};
};

// The micro-batch decides how sums are split and so the
// result; where state lives, and how much memory it may take, must not. So the micro-batch is the machine's,
// whatever offload.* asks for; only where it does not fit what offload.* leaves is it chosen once more, and
// the reason says so. What the run has recorded is kept.
ChosenNumerics choose_numerics(const PlanInput& in);

// <run>/numerics.json.
std::string numerics_json(const NumericsPlan& numerics);
// Throws Error(14) for what is damaged; `place` is the file's name.
NumericsPlan parse_numerics(const std::string& text, const std::string& place);

}  // namespace lm
