// A rank: the object that owns a device's stream, weights, gradients, optimizer state and arena, and the step
// that works on them. Nothing in it is global. One thread, the compute thread, constructs and uses it.
#pragma once

#include <memory>
#include <optional>

#include "base/error.h"
#include "comm/machine_memory.h"
#include "config/config.h"
#include "kernels/timed.h"
#include "plan/plan.h"
#include "plan/state_catalogue.h"
#include "train/decoder.h"
#include "train/off_device_state.h"
#include "train/step.h"

namespace lm {

// What a rank is made from; the referenced values outlive it.
struct RankSetup {
  const ModelSpec& spec;
  const ModelLayout& layout;
  const AdapterSpec* adapter = nullptr;  // null: full fine-tuning
  const OptimizerConfig& optimizer;
  const Plan& plan;
  int64_t seed = 42;
  int64_t max_length = 2048;    // tokens of a document: the RoPE table's length
  int64_t tokens_per_step = 0;  // at most; 0: no training (evaluation, generation)
  double max_grad_norm = 1.0;
  double router_aux_loss = 0;             // StepConfig::router_aux_loss
  std::vector<SwapPath> swap_paths = {};  // of what the plan puts on disk
  EngineFactory engine = {};              // tests: instead of the plan's
  StoreFactory store = {};                // tests: instead of this machine's memory and disks
  bool slots_on_device = false;           // tests: even where that is the CPU
  Group* group = nullptr;                 // that this rank is of, and outlives it; null: it is alone
  Group* device_group = nullptr;          // the same ranks, for what lies on their GPUs; null: as `group`
  // That outlives it, for the frozen weights which the plan has once on a machine; null: in this rank's
  // memory.
  MachineMemory* machine_memory = nullptr;
  const Kernels* kernels = nullptr;  // tests: instead of the device's
  Trace* trace = nullptr;            // outlives the rank
  const Objective& objective = objectives::cross_entropy;
};

class Rank {
 public:
  // Allocates everything the rank will ever use. `stream` is start_torch's.
  Rank(const RankSetup& setup, StreamView stream);
  ~Rank();  // waits for the stream: what it owns may still be in use
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  WeightStore& weights() { return weights_; }
  ShardedOptimizer& optimizer() { return *optimizer_; }
  Gradients& gradients() { return *gradients_; }
  TrainStep& step() { return *step_; }
  const Objective& objective() const { return setup_.objective; }
  int64_t scores() const { return setup_.spec.scores() ? setup_.spec.head_rows() : 0; }  // of a document
  bool training() const { return optimizer_ != nullptr; }
  const Context& context() const { return context_; }
  const Arena& arena() const { return arena_; }
  const OffDeviceState& off_device() const { return off_device_; }
  // Where the plan has a cache.
  Decoder& decoder() { return *decoder_; }
  Group& group() { return group_; }
  Group& device_group() { return device_group_; }
  ProgressCounter& progress_counter() { return progress_counter_; }
  // To other ranks so far, of what lies on the device and of the rest.
  int64_t sent_bytes() const {
    return group_.sent_bytes() + (&device_group_ == &group_ ? 0 : device_group_.sent_bytes());
  }
  int64_t sent_between_machines() const {
    return group_.sent_between_machines() +
           (&device_group_ == &group_ ? 0 : device_group_.sent_between_machines());
  }

  // Of this process's resident memory, what the plan counts to other ranks of the machine.
  int64_t memory_of_others() const { return shares_frozen() ? setup_.machine_memory->of_others() : 0; }

  // All that is frozen has been loaded, on all ranks: the same call on each.
  void frozen_ready();
  // Initialises the master weights from the loaded or initialised weights.
  void weights_ready();
  // All state that a checkpoint saves: a pure list, made from layout and plan.
  StateCatalogue catalogue() const;
  // All of it from a checkpoint, between steps; `updates`: of the optimizer so far. Where it throws the state
  // is neither the old nor the new one, and may be restored again.
  void restore(StateReader& from, int64_t updates);

  // Whether the run can go on after an error that ended a step: reset, then all of the catalogue's state
  // written anew. Damaged bytes and failed transfers can be got over; nothing of the state has been computed
  // from them.
  bool can_reset(const Error& error) const;
  // Nothing is under way, no slot holds anything, and what is off the device is as if it was never written.
  // Throws Error(21) where a disk hangs.
  void reset();

 private:
  void make_step();
  bool shares_frozen() const {
    return setup_.machine_memory != nullptr && setup_.plan.placement.frozen_sharers > 1;
  }
  WeightPlaces weight_places();

  const RankSetup setup_;
  ProgressCounter progress_counter_;
  LocalGroup alone_;
  Group& group_;
  Group& device_group_;
  DeviceType device_;
  OffDeviceState off_device_;
  WeightStore weights_;
  Arena arena_;
  RopeTable rope_;
  // On a GPU, registered: what a step sends and reads.
  PinnedPool step_memory_;
  PinnedBlock upload_memory_, result_memory_, router_memory_;
  Uploads uploads_;
  std::unique_ptr<TimedKernels> timed_kernels_;
  Context context_;
  // Absent without training: nothing is allocated for what does not happen.
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::unique_ptr<EmbeddingGradient> embedding_gradient_;
  std::unique_ptr<TrainStep> step_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace lm
