// A rank that trains on random weights and tokens, for benchmarks of whole steps.
#pragma once

#include <memory>

#include "kernels/runtime.h"
#include "train/rank.h"

namespace lm {

struct SyntheticSetup {
  ModelSpec spec;
  bool lora = false;  // r 16, all projections, and DoRA as `config` has it
  Config config;      // global_batch, micro_batch (may be auto), max_length, threads and tiers count
  int64_t slots = 0;  // of the optimizer; 0: as planned
  EngineFactory engine = {};
  std::optional<bool> update_on_host = {};  // with a GPU; none: as planned
  bool pattern = false;  // with a GPU: weights repeat one tile (gpu_pattern.h), which takes no time to make
  // As RankSetup's; of a group's ranks each has its part of the batch.
  Group* group = nullptr;
  Group* device_group = nullptr;
  const Kernels* kernels = nullptr;
  Trace* trace = nullptr;  // outlives the run, which tells it of steps
};

// This machine's CPU, of which the run has so many cores, with memory without end, so that nothing is planned
// for want of it. Rates and disks are the caller's to measure.
Machine roomy_machine(int threads);

// What start_torch wants to know of such a run on the CPU, before a machine is measured.
int64_t planned_gemm_shapes(const ModelSpec& spec, bool lora, const Config& config);

class SyntheticRun {
 public:
  // Plans, allocates and initialises. `machine` is what the plan may assume.
  SyntheticRun(SyntheticSetup setup, const Machine& machine, StreamView stream);

  StepResult step();  // waits until the GPU has finished it
  // As a run's: only enqueued where steps run ahead, and the results are those of the step before.
  StepResult begin_step();
  const Plan& plan() const { return plan_; }
  // What the plan would say of a step's time with these rates.
  double planned_seconds(const Machine& machine) const;
  // The plan's peak of host memory for batches as these: the plan has room for the GEMM library's code for
  // rows of every length, and these batches have one number of rows; and for a save's buffers, and nothing is
  // saved here.
  int64_t planned_host_bytes() const;
  // Of a row of the plan.
  int64_t class_bytes(std::string_view name) const;
  const ModelLayout& layout() const { return layout_; }
  const AdapterSpec* adapter() const { return setup_.lora ? &adapter_ : nullptr; }
  const Rank& rank() const { return *rank_; }
  Rank& rank() { return *rank_; }
  int64_t tokens_per_step() const;

 private:
  SyntheticSetup setup_;
  StreamView stream_;
  int64_t gemm_shape_bytes_;
  AdapterSpec adapter_;
  ModelLayout layout_;
  Plan plan_;
  std::unique_ptr<Rank> rank_;
  StepBatches batches_;
  int64_t steps_ = 0;
  bool unread_ = false;  // a step's results
};

}  // namespace lm
