// One optimizer step: walks the schedule's operations in order on the compute thread. Compute is a Pass's;
// this is the memory that it works on, and the checks, transfers and updates between. Owns nothing that
// outlives a step but the accumulators and what is deferred to the next; weights, gradients and optimizer
// state belong to their stores.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/batch.h"
#include "base/trace.h"
#include "model/pass.h"
#include "model/routers.h"
#include "optim/gradients.h"
#include "optim/sharded_optimizer.h"
#include "schedule/step_lists.h"
#include "train/device_decision.h"
#include "train/objectives/objective.h"
#include "train/off_device_state.h"
#include "train/progress_counter.h"
#include "train/rank_experts.h"
#include "train/routed_experts.h"
#include "train/step_save.h"
#include "weights/loans.h"

namespace lm {

// What the step works on; borrowed.
struct StepParts {
  const Context& context;
  ModelParts model;
  WeightStore& weights;
  const OffDeviceState& off_device;
  // Null where nothing is trained: then `run` must not be called. The embedding's also where it is frozen.
  Gradients* gradients = nullptr;
  ShardedOptimizer* optimizer = nullptr;
  EmbeddingGradient* embedding_gradient = nullptr;
  Group& group;
  Group& device_group;  // the same ranks, for what lies on the device; on the CPU the same one
  // Registered host memory for StepSums, to which those of a step are copied; on the CPU empty.
  std::span<std::byte> host_sums = {};
  // The same for StepDecision of DeviceDecision::kInFlight steps.
  std::span<std::byte> host_decisions = {};
  // The same for what a layer's router has chosen (train/routed_experts.h).
  std::span<std::byte> host_starts = {};
  Trace* trace = nullptr;
  ProgressCounter* progress_counter = nullptr;  // null: nobody watches
  const Objective& objective = objectives::cross_entropy;
};

struct StepResult {
  double loss = 0;            // sum of nll / target tokens, over the whole step; or the objective's
  double token_accuracy = 0;  // share of target tokens that are the argmax of their logits
  double grad_norm = 0;       // before clipping, and without the loss scale
  bool skipped = false;       // loss or norm not finite: no weight and no moment has changed
  std::string fault;  // of a skipped step: "the gradient of tensor layers.7.mlp.down is inf (rank 0)", "the
                      // loss is nan (rank 0)"
  NamedColumns columns = {};  // the objective's, and those of experts
  RoutedCounts routed = {};   // since the step before: with what evaluations between have fetched by routing
};

// Results for each target of a batch, in its order.
struct TargetResults {
  std::vector<float> nll, correct;  // correct: 1 if the target is the argmax of its logits, else 0
  std::vector<float> scores = {};   // of a head of scores, in place of these: [targets, labels]
};

class TrainStep : private PassMemory {
 public:
  TrainStep(const StepParts& parts, StepConfig config);

  // `step` counts from 1 and keys the randomness. Updates of blocks whose state is off the device may be left
  // to the next call. Gradients are those of `loss_scale` times the loss; the updates divide by it.
  StepResult run(const StepBatches& batches, int64_t step, double lr, double loss_scale = 1);

  // The same in two halves. Where runs_ahead(), start() only enqueues the step's work, and the next one may
  // be started before finish() has given this one's results; elsewhere start() waits for them. Steps are
  // finished in order. Evaluation and saves come when all are.
  void start(const StepBatches& batches, int64_t step, double lr, double loss_scale = 1);
  StepResult finish();
  bool runs_ahead() const { return decision_.has_value(); }

  // Completes what is deferred and empties the slots: afterwards every byte of state is in its tier. Throws
  // what a store reports of a write (offload/store.h).
  void flush();

  // Between steps: a save of the state after the last one, which rides on the next (step_save.h). What
  // `setup` throws when it is read at once is thrown. It has all bytes after the next step or flush; end_save
  // before it goes.
  std::unique_ptr<StepSave> begin_save(const StepSaveSetup& setup);
  void end_save() { save_ = nullptr; }
  bool saving() const { return save_ != nullptr; }
  bool traced() const { return trace_ != nullptr && trace_->recording(); }

  // Sums over the batch's targets, without gradients. Begins with a flush. `targets`: receives the results of
  // each target; null: not wanted.
  LossSums evaluate(const Batch& batch, TargetResults* targets = nullptr);
  // logits [rows, V] after the given tokens (rows of the batch), fp32 in host memory: generation and tests.
  // Begins with a flush.
  std::vector<float> logits(const Batch& batch, const std::vector<int32_t>& rows);
  // Tokens that continue the text of a cache, which they join.
  struct Continuation {
    KeyValueCache* cache;
    std::span<const int32_t> tokens;
  };
  // The same after the last rows of the continuations together, as many as `logits` [rows, V] has: of one
  // text its last tokens, of several with one token each the logits of each. In device memory, complete when
  // the stream has been waited for.
  void extend(std::span<const Continuation> texts, const View& logits);

  // An operation of a step, for people. Any thread.
  std::string name(const Operation& operation) const;

 private:
  // Parameters of deferred updates, set once the step was found finite.
  struct Update {
    double lr = 0;
    float scale = 1;  // clipping, and the loss scale's inverse
    int64_t step = 0;
    bool skipped = false;
  };

  // carry_out, traced.
  void execute(const Operation& operation);
  void carry_out(const Operation& operation);
  // The operation's dependencies are ready: marks the start of its compute in the trace.
  void arrived() {
    if (trace_ != nullptr) arrived_ns_ = steady_ns();
  }
  void transfer(const Operation& operation);
  void add_rows();
  void norm(const Operation& operation);
  void gather(const Operation& operation);
  // Name of what was not finite: a tensor of the block, from the rank that has its gradient, or the loss.
  std::string find_fault(std::optional<int64_t> block, double loss) const;
  void explain_skip(int64_t block);
  void check();
  bool decides_on_device() const;
  void decide();
  // The oldest unread decision becomes a result.
  void read_decision();
  // The objective's columns over all ranks; one named "loss" replaces the loss.
  void gather_columns(double divisor);
  // Routers of a step (step_routers.cpp).
  void begin_routers();
  void watch_routers(const Operation& operation);
  void settle_routers();
  void settle_routers_on_device();
  void end_routers();
  void add_router_columns(const RouterFigures& read, StepResult& to) const;
  void update(const Operation& operation);
  float block_scale(int64_t block) const;
  // Ends the run: without global clipping an update may have been made before the fault was found.
  [[noreturn]] void fail_step(const std::string& fault) const;

  // PassMemory
  DeviceBatch place(int64_t micro) override;
  BlockMemory borrow(int64_t unit, bool gradient) override;
  void begin_gradient(int64_t unit) override { gradients_->begin(unit); }
  void add_embedding_gradient(int64_t micro, const RowGradients& of) override;
  void weigh(int64_t micro, const View& rows) override;
  void score(const Batch& batch, const View& rows);
  std::byte* make_input(int64_t block, int64_t micro, int64_t bytes) override;
  std::byte* input(int64_t block, int64_t micro) override;
  const Unit& unit(const Operation& operation) const {
    return weights_.units()[static_cast<size_t>(operation.unit)];
  }
  void wait_for_group();
  // Of which a step's fetches are for so many: a group's micro-batches meet a unit's weights together.
  int64_t tokens_at_once() const { return config_.micro_rows * config_.group * layout_.experts.ranks; }
  // Carries out an evaluation's list; `head` does what the head's operations are for.
  using HeadVisitor = std::function<void(const Operation& operation, ForwardPass& pass)>;
  // `routers`: those of the step under way, whose dropouts the pass has; null: it is none of a step.
  void walk_forward(const Batch& batch, const HeadVisitor& head,
                    std::span<const KeyValueCache* const> caches = {}, Routers* routers = nullptr);
  // Logits of the rows that `pick` takes of the last block's output [T, H].
  using RowPicker = std::function<View(const View& x)>;
  void walk_logits(const Batch& batch, const RowPicker& pick, const View& out,
                   std::span<const KeyValueCache* const> caches = {});
  bool first_update(const Operation& operation) const;
  void zero_loss();
  StepSums* sums() { return reinterpret_cast<StepSums*>(sums_.data()); }  // on the device
  // Sums so far: sends them to the host, waits for the stream and so for everything before.
  LossSums read_loss();

  const Context& context_;
  const ModelLayout& layout_;
  WeightStore& weights_;
  const OffDeviceState& off_device_;
  Gradients* gradients_;
  ShardedOptimizer* optimizer_;
  EmbeddingGradient* embedding_gradient_;
  Group& group_;
  Group& device_group_;
  Trace* trace_;
  ProgressCounter* progress_counter_;
  const Objective& objective_;
  int64_t arrived_ns_ = 0;  // of the operation under way
  int64_t head_;            // the last block, and its unit
  StepLists lists_;
  const StepConfig& config_;  // of the lists
  Update update_;
  std::array<std::vector<int64_t>, kPools> in_slots_;  // the array that each slot holds
  StepSave* save_ = nullptr;                           // that rides on this step

  // State of the step that is being executed.
  const StepBatches* batches_ = nullptr;
  int64_t step_ = 0;
  double lr_ = 0, loss_scale_ = 1;
  StepResult result_;
  std::vector<double> columns_;     // the objective's, of this rank
  std::optional<Routers> routers_;  // of a model with experts
  bool update_begun_ = false;
  std::optional<int64_t> faulty_block_;     // that the second of two backwards is to look for its fault in
  std::vector<std::optional<Loan>> loans_;  // per unit, between acquire and release
  // Per unit, of a group of GPUs: a gather of its weights, which its next use waits for.
  std::vector<Moved> gathered_;
  CollectiveNames gathers_;
  Memory sums_;                             // StepSums, on the device
  StepSums* host_sums_;                     // the same where the host reads them
  std::optional<DeviceDecision> decision_;  // where the device decides
  std::deque<int64_t> started_;             // target tokens of the steps whose decisions are unread
  std::deque<StepResult> finished_;         // that nobody has asked for yet
  RoutedExperts routed_;
  std::optional<RankExperts> rank_experts_;  // where ranks keep some experts each
  Pass pass_;
};

}  // namespace lm
