// One optimizer step: walks the schedule's operations in order on the compute thread. Owns nothing that
// outlives a step but the accumulators; weights, gradients and optimizer state belong to their stores.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/batch.h"
#include "model/bind.h"
#include "model/embedding.h"
#include "optim/gradients.h"
#include "optim/sharded_optimizer.h"
#include "plan/schedule.h"
#include "weights/loans.h"

namespace lm {

struct StepSettings {
  BindOptions bind;         // seed; `training` and `step` are set here
  bool recompute = false;   // keep block inputs only
  int64_t row_chunk = 512;  // rows of logits at once
  Clip clip = Clip::kGlobal;
  double max_grad_norm = 1.0;
};

struct StepResult {
  double loss = 0;       // sum of nll / target tokens, over the whole step
  double grad_norm = 0;  // before clipping
  bool skipped = false;  // loss or norm not finite: no weight and no moment has changed
};

class TrainStep {
 public:
  // `gradients` and `optimizer` are null where nothing is trained: then `run` must not be called.
  TrainStep(const Context& context, const ModelLayout& layout, WeightStore& weights, Gradients* gradients,
            ShardedOptimizer* optimizer, EmbeddingGradient* embedding_gradient, const StepSettings& settings);
  ~TrainStep();

  // `step` counts from 1 and keys the randomness; `schedule` is the one of batches.micro.size()
  // micro-batches.
  StepResult run(const StepSchedule& schedule, const StepBatches& batches, int64_t step, double lr);

  // Sum of nll over the batch's targets, without gradients.
  double evaluate(const Batch& batch);
  // logits [rows, V] after the given tokens (rows of the batch), fp32 in host memory: generation and tests.
  std::vector<float> logits(const Batch& batch, const std::vector<int32_t>& rows);

 private:
  struct MicroBatch;  // what lives between a micro-batch's first and last operation

  void execute(const Operation& operation, const StepBatches& batches, double lr);
  void forward(int64_t block, int64_t micro, const StepBatches& batches);
  void head(int64_t micro, float scale);
  void recompute(int64_t block);
  void backward(int64_t block, int64_t micro);
  void reduce(int64_t block);
  void check(const StepBatches& batches);
  void update(int64_t block, double lr);

  BlockMemory borrow(int64_t block);
  BindOptions bind_options(bool training) const;
  Param bind_embedding(bool training);
  at::Tensor forward_only(const DeviceBatch& batch);
  bool trained(int64_t block) const;

  const Context& context_;
  const ModelLayout& layout_;
  WeightStore& weights_;
  Gradients* gradients_;  // null, as the next, where nothing is trained
  ShardedOptimizer* optimizer_;
  EmbeddingGradient* embedding_gradient_;  // null when the embedding is frozen
  StepSettings settings_;
  int64_t layers_;

  // Of the step being walked.
  int64_t step_ = 0;
  StepResult result_;
  bool update_begun_ = false;
  float gradient_scale_ = 1;
  std::vector<std::optional<Loan>> loans_;  // per block, between acquire and release
  std::unique_ptr<MicroBatch> micro_;
  Memory nll_;  // fp64, on the device
};

}  // namespace lm
