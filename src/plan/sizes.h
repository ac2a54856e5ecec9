// The bytes of a plan: every class of a run's memory, given the numerics already chosen. Inside src/plan.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <tuple>

#include "plan/plan.h"

namespace lm {

// What was dry-run while a plan is made: candidates differ in tiers, and most of them not in what they need
// of the arena, fewer yet in what they multiply.
class DryRuns {
 public:
  ArenaNeed arena(const PlanInput& in, const NumericsPlan& numerics, const StepConfig& of);
  // The different products of one micro-batch.
  int64_t gemm_shapes(const PlanInput& in, const NumericsPlan& numerics, const StepConfig& of);
  // Of a plan whose tiers are chosen (dry_run.h: offloaded_activations).
  const std::vector<int64_t>& activations(const PlanInput& in, const PlacedPlan& plan);

 private:
  // The model, all that a dry run depends on, tokens, documents or micro-batches, and whether it trains.
  using Key = std::tuple<const ModelSpec*, const ModelLayout*, const AdapterSpec*, StepConfig, int64_t,
                         int64_t, bool>;
  static Key key(const PlanInput& in, const StepConfig& step, int64_t tokens, int64_t count);

  std::map<Key, ArenaNeed> arenas_;
  std::map<Key, int64_t> gemm_shapes_;
  std::map<Key, std::vector<int64_t>> activations_;
};

// All that a plan is made from; borrowed for the call.
struct PlanInput : PlanInputs {
  const Machine& machine;
  World world;
  PlanPurpose purpose;
  std::shared_ptr<DryRuns> dry_runs = std::make_shared<DryRuns>();

  bool trains() const { return purpose == PlanPurpose::kTrain; }
  // The first block with a trained tensor, for full fine-tuning.
  int64_t first_trained() const { return adapter == nullptr ? layout.first_trained() : 0; }
  ModelParts model() const { return {spec, layout, adapter}; }
  // offload.*, of the classes that there are.
  OffloadConfig offload() const;
  PlanInput with(const Config& other) const {
    return {{other, spec, adapter, layout, device, data, update_on_host, recorded},
            machine,
            world,
            purpose,
            dry_runs};
  }
  PlanInput with(const Machine& other) const { return {*this, other, world, purpose, dry_runs}; }
  PlanInput with(PlanPurpose other) const {
    PlanInput out = *this;
    out.purpose = other;
    return out;
  }
};

inline int64_t size_of(DType type) {
  return static_cast<int64_t>(dtype_size(type));
}

// The most documents that a micro-batch can have.
int64_t micro_documents(const PlanInput& in, const NumericsPlan& numerics);

// Tokens of the longest micro-batch, or what generation takes at once.
int64_t micro_tokens(const PlanInput& in, const NumericsPlan& numerics);

PlanSizes size_plan(const PlanInput& in, const PlacedPlan& plan);
// The plan with its sizes.
SizedPlan sized(const PlanInput& in, PlacedPlan plan);

// Whether the plan's memory would fit the machine with nothing else running: what numerics may depend on.
// Disks are left out: what is free on them never steers numerics.
bool fits_capacity(const PlanSizes& sizes);
// Whether its memory fits what is free now.
bool fits_memory(const PlanSizes& sizes);

}  // namespace lm
