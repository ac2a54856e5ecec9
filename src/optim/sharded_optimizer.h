// AdamW's state of a rank and the update of a block: per block the master (or its low half), first and second
// moment, in the layout of its weights. The compute thread calls; on a GPU the update is enqueued.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "base/state.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "spec/block_layout.h"

namespace lm {

struct UpdateInputs {
  std::byte* weights = nullptr;  // the block's working weights
  const std::byte* gradients = nullptr;
  DType gradient_dtype = DType::kF32;
  float gradient_scale = 1;  // clipping
  double lr = 0;
  int64_t step = 0;  // optimizer step, keys stochastic rounding
};

class ShardedOptimizer {
 public:
  // `weight_dtype` bf16 takes `master` as configured; fp32 weights are their own master.
  ShardedOptimizer(const ModelLayout& layout, const OptimizerConfig& config, DType weight_dtype, int64_t seed,
                   const Kernels& kernels, StreamView stream);

  // The masters take the loaded weights' values (a split master's low halves start at zero). With fp32
  // masters `weights` must already be there.
  void start(int64_t block, const std::byte* weights);
  // One more update begins: Adam's t counts it (a skipped step does not).
  void begin_update() { ++t_; }
  void update(int64_t block, const UpdateInputs& inputs);
  int64_t t() const { return t_; }

  // fp32 value of a trainable tensor's master into `out` (host memory, its elements), for LoRA's export.
  void read_master(int64_t block, const TensorPlace& place, const std::byte* weights, float* out) const;

  void visit_state(StateVisitor& visitor);

 private:
  struct State {
    Memory master;  // u16 low halves, fp32, or nothing
    Memory m, v;    // fp32
  };
  const ModelLayout& layout_;
  OptimizerConfig config_;
  DType weight_dtype_;
  AdamW::Master mode_;
  int64_t seed_;
  const Kernels& kernels_;
  StreamView stream_;
  std::vector<State> blocks_;
  int64_t t_ = 0;
};

}  // namespace lm
