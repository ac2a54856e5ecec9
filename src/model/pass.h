// The compute operations of a step's list, carried out: forward, head, recomputation and backward of
// micro-batches through the blocks, with what of their activations lies in the arena and when it is given
// back. What has a tier of its own (weights, gradients, inputs off the device) belongs to a PassMemory. A
// step runs it on a rank's memory (train/step.h), a plan dry-runs it on none (plan/dry_run.h). One thread.
#pragma once

#include <memory>
#include <vector>

#include "model/bind.h"
#include "model/carried.h"
#include "model/embedding.h"
#include "schedule/schedule.h"

namespace lm {

class PassMemory {
 public:
  virtual ~PassMemory() = default;
  // The micro-batch on the device; its arrays come from the context's arena.
  virtual DeviceBatch place(int64_t micro) = 0;
  // The unit's weights, which are on loan; with `gradient` also where its gradient is added up.
  virtual BlockMemory borrow(int64_t unit, bool gradient) = 0;
  // The step's first addition to the unit's gradient comes next.
  virtual void begin_gradient(int64_t unit) = 0;
  // Only called where the embedding is trained.
  virtual void add_embedding_gradient(int64_t micro, const RowGradients& of) = 0;
  // Replaces each row's nll [R] by its weight in the loss; only called with StepConfig::two_phases. Of a head
  // of scores: replaces the rows' scores [R, labels] by the gradient of the step's loss.
  virtual void weigh(int64_t micro, const View& rows) = 0;
  // Of activations of a block that live off the device (StepConfig::inputs_off_device): its input, and
  // behind it what its forward keeps for its backward. make_input: memory for so many bytes of them, which
  // are about to be made; those that are there already stay. input: where they are now.
  virtual std::byte* make_input(int64_t block, int64_t micro, int64_t bytes) = 0;
  virtual std::byte* input(int64_t block, int64_t micro) = 0;
};

class Pass {
 public:
  // Borrows all but the model's parts. `sums`: in device memory; losses are added to them.
  Pass(const Context& context, const ModelParts& model, PassMemory& memory, const StepConfig& step,
       LossSums* sums);
  ~Pass();

  // A step of so many micro-batches begins; `loss_scale` is 1 / its target tokens.
  void begin(int64_t step, int64_t micro_batches, float loss_scale);
  // One of the step's list that computes().
  void carry_out(const Operation& operation);

  // The step has ended: so has what the arena had for it alone.
  void end();

  // Where the arena has room for the gradients of one block after another, and of a tied table that is made
  // last, behind which there is nothing then; null: gradients have memory of their own.
  std::byte* gradient_slot() const { return gradient_slot_; }

  // The embedding's output x [T, H], and what it makes for the layers.
  void embed(const Embedding& tables, const DeviceBatch& batch, const View& x) const;

  // The embedding's weights, and its dropout if `training`.
  Embedding embedding(const BlockMemory& memory, bool training) const;

 private:
  friend class ForwardPass;
  struct MicroBatch;  // what lives between a micro-batch's first and last operation

  void forward(int64_t block, int64_t micro);
  void begin_micro(int64_t micro);
  void pass_over(int64_t block, int64_t micro);
  void recompute(int64_t block, int64_t micro);
  void backward(int64_t block, int64_t micro);
  void embedding_backward(int64_t micro);
  void end_group(int64_t micro);
  void begin_gradient(const Operation& operation);
  void head(int64_t block, int64_t micro);
  void weigh(int64_t micro, HeadRows& rows);
  void table_gradient(int64_t micro);
  void take_gradient_slot(const ModelLayout& layout);
  HeadRows& kept_head(int64_t micro) { return kept_heads_[static_cast<size_t>(micro % config_.group)]; }
  // Of a chunked head: of a segment, or of the final norm.
  void head_forward(const Operation& operation);
  void head_backward(const Operation& operation);

  const Unit& unit(const Operation& operation) const { return units_[static_cast<size_t>(operation.unit)]; }
  MicroBatch& at(int64_t micro) { return *group_[static_cast<size_t>(micro % config_.group)]; }
  bool first_of_group(int64_t micro) const { return micro % config_.group == 0; }
  bool last_of_group(int64_t micro) const;
  // x_in [T, H] of a block; `make_input` gives it memory first.
  View input(int64_t block, int64_t micro);
  View make_input(int64_t block, int64_t micro);
  // Gives what the block keeps from forward to backward memory, before forward, or its place again.
  enum class Keep : uint8_t { kMake, kFind };
  void keep(const TransformerBlock& bound, int64_t block, int64_t micro, Keep how);

  BindOptions options(bool training) const;
  TransformerBlock bind_block(int64_t block, bool gradient, bool training);
  Head bind_head(bool gradient);
  Norm bind_norm(bool gradient);
  HeadSegment bind_segment(const Operation& operation, bool gradient);
  LossOptions loss_options(int64_t micro);

  const Context& context_;
  ModelBinding binding_;
  std::vector<Unit> units_;
  PassMemory& memory_;
  const StepConfig& config_;
  LossSums* sums_;
  int64_t head_;           // the last block, and its unit
  int64_t first_trained_;  // block; nobody wants the gradient of its input
  bool norm_trained_;      // the final norm
  const bool prompt_trained_, table_adapted_;
  // Of a tied table that is made last: what each micro-batch's head has kept for it, and behind that in the
  // arena the slot, at whose beginning it begins, too.
  std::vector<HeadRows> kept_heads_;
  std::byte* gradient_slot_ = nullptr;
  int64_t slot_mark_ = 0, end_mark_ = 0;  // of the arena, before the slot and behind it
  int64_t table_bytes_ = 0;

  // Of the step under way.
  int64_t step_ = 0, micro_batches_ = 0;
  float loss_scale_ = 0;
  bool inputs_kept_ = false;  // the first of two backwards has been
  std::vector<std::unique_ptr<MicroBatch>> group_;
  std::vector<int64_t> mark_;   // of the arena, before a block's saved activations
  int64_t group_mark_ = 0;      // before the group
  int64_t recompute_mark_ = 0;  // before the recomputation under way
};

// One batch through the blocks without gradients: evaluation, generation. Its activations are given back when
// it ends.
class ForwardPass {
 public:
  // `batch` is in the arena since after `frame` began. `training`: with the dropouts of the step under way.
  ForwardPass(Pass& pass, DeviceBatch batch, bool training = false);
  ForwardPass(const ForwardPass&) = delete;  // the batch points into it
  ForwardPass& operator=(const ForwardPass&) = delete;

  // kForward of the embedding or of a transformer block.
  void carry_out(const Operation& operation);
  // The head's operations, for the loss; whole or cut.
  void head(const Operation& operation);
  // The nll of each target row, [R] fp32 in the arena, once the last of the head's operations has computed
  // them; before, and without targets, undefined. Of a head of scores: these, [R, labels].
  const View& losses() const { return losses_; }
  // The same: 1 where the target is the argmax, else 0.
  const View& correct() const { return correct_; }
  const View& x() const { return x_; }  // [T, H], the input of what comes next
  Head bind_head() { return pass_.bind_head(false); }
  Norm bind_norm() { return pass_.bind_norm(false); }
  HeadSegment bind_segment(const Operation& operation) { return pass_.bind_segment(operation, false); }

 private:
  Pass& pass_;
  bool training_;
  DeviceBatch batch_;
  Carried carried_;
  View x_, y_;  // take turns: a block reads one and writes the other
  HeadRows rows_;
  View losses_, correct_;
};

}  // namespace lm
