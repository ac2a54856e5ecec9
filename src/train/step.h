// One optimizer step: walks the schedule's operations in order on the compute thread, transfers included.
// Owns nothing that outlives a step but the accumulators and what is deferred to the next; weights, gradients
// and optimizer state belong to their stores.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/batch.h"
#include "base/trace.h"
#include "model/bind.h"
#include "model/embedding.h"
#include "optim/gradients.h"
#include "optim/sharded_optimizer.h"
#include "schedule/transfers.h"
#include "train/far_state.h"
#include "weights/loans.h"

namespace lm {

// What the step works on; borrowed.
struct StepParts {
  const Context& context;
  const ModelLayout& layout;
  WeightStore& weights;
  const FarState& far;
  // Null where nothing is trained: then `run` must not be called. The embedding's also where it is frozen.
  Gradients* gradients = nullptr;
  ShardedOptimizer* optimizer = nullptr;
  EmbeddingGradient* embedding_gradient = nullptr;
  // Registered host memory for one double, to which the loss is copied; on the CPU empty.
  std::span<std::byte> host_loss = {};
  Trace* trace = nullptr;
};

struct StepSettings {
  BindOptions bind;         // seed; `training` and `step` are set here
  bool recompute = false;   // keep block inputs only
  int64_t row_chunk = 512;  // rows of logits at once
  Clip clip = Clip::kGlobal;
  double max_grad_norm = 1.0;
  ScheduleShape shape;  // micro_batches and pending are set per step
  TransferShape transfers;
};

struct StepResult {
  double loss = 0;       // sum of nll / target tokens, over the whole step
  double grad_norm = 0;  // before clipping
  bool skipped = false;  // loss or norm not finite: no weight and no moment has changed
};

class TrainStep {
 public:
  TrainStep(const StepParts& parts, const StepSettings& settings);
  ~TrainStep();

  // `step` counts from 1 and keys the randomness. Updates of blocks whose state is off the device may be left
  // to the next call.
  StepResult run(const StepBatches& batches, int64_t step, double lr);

  // Completes what is deferred and empties the slots: afterwards every byte of state is at its home.
  void flush();

  // Sum of nll over the batch's targets, without gradients. Begins with a flush.
  double evaluate(const Batch& batch);
  // logits [rows, V] after the given tokens (rows of the batch), fp32 in host memory: generation and tests.
  // Begins with a flush.
  std::vector<float> logits(const Batch& batch, const std::vector<int32_t>& rows);

 private:
  struct MicroBatch;  // what lives between a micro-batch's first and last operation
  // What the check of a step hands to the updates that wait for it.
  struct Update {
    double lr = 0;
    float scale = 1;  // clipping
    int64_t step = 0;
    bool skipped = false;
  };

  // carry_out, traced.
  void execute(const Operation& operation, const StepBatches& batches);
  void carry_out(const Operation& operation, const StepBatches& batches);
  std::string name(const Operation& operation) const;
  // What an operation needs has come: its compute begins.
  void arrived() {
    if (trace_ != nullptr) arrived_ns_ = steady_ns();
  }
  void transfer(const Operation& operation);
  void forward(int64_t block, int64_t micro, const StepBatches& batches);
  void begin_micro(int64_t micro, const StepBatches& batches);
  void head(int64_t micro);
  // Of a cut head: of a segment, or of what is left.
  void head_forward(const Operation& operation);
  void head_backward(const Operation& operation);
  void recompute(int64_t block, int64_t micro);
  void backward(int64_t block, int64_t micro);
  void reduce(const Operation& operation);
  void check(const StepBatches& batches);
  void update(const Operation& operation);
  float block_scale(int64_t block) const;

  MicroBatch& at(int64_t micro) { return *group_[static_cast<size_t>(micro % settings_.shape.group)]; }
  bool last_of_group(int64_t micro) const;
  int64_t input_array(int64_t block, int64_t micro) const;
  // x_in [T, H] of a block; `make_input` gives it memory first.
  at::Tensor input(int64_t block, int64_t micro);
  at::Tensor make_input(int64_t block, int64_t micro);

  // What the operation's block or segment has on loan; `training`: its gradient, too.
  BlockMemory borrow(int64_t unit, bool training);
  int64_t unit(const Operation& operation) const { return operation.unit(layers_); }
  BindOptions bind_options(bool training) const;
  Param bind_embedding(bool training);
  TransformerBlock bind_block(int64_t block, bool training);
  Head bind_last(bool training);
  Param bind_last_norm(bool training);
  HeadSegment bind_head_segment(int64_t segment, bool training);
  LossOptions loss_options(int64_t micro) const;
  // Runs forward up to the head and calls `head` with its input for each of the head's operations.
  using HeadVisitor =
      std::function<void(const Operation& operation, const DeviceBatch& batch, const at::Tensor& x)>;
  void walk_forward(const Batch& batch, const HeadVisitor& head);
  bool trained(int64_t block) const;
  void zero_loss();
  // Sum of nll so far: sends it to the host, waits for the stream and so for everything before.
  double read_loss();

  const Context& context_;
  const ModelLayout& layout_;
  WeightStore& weights_;
  const FarState& far_;
  Gradients* gradients_;
  ShardedOptimizer* optimizer_;
  EmbeddingGradient* embedding_gradient_;
  Trace* trace_;
  int64_t arrived_ns_ = 0;  // of the operation under way
  StepSettings settings_;
  int64_t layers_;
  SlotState slots_;  // between lists
  bool pending_ = false;
  Update update_;

  // Of the step being walked.
  int64_t step_ = 0;
  int64_t micro_batches_ = 0;
  double lr_ = 0;
  StepResult result_;
  bool update_begun_ = false;
  float loss_scale_ = 0;                    // 1 / target tokens
  std::vector<std::optional<Loan>> loans_;  // per unit, between acquire and release
  std::vector<std::unique_ptr<MicroBatch>> group_;
  std::vector<int64_t> mark_;   // of the arena, before a block's saved activations
  int64_t group_mark_ = 0;      // before the group
  int64_t recompute_mark_ = 0;  // before the recomputation under way
  Memory nll_;                  // fp64, on the device
  double* host_nll_;            // the same where the host reads it
};

}  // namespace lm
