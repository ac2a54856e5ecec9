#include "model/pass.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "model/score_head.h"

namespace lm {

// The activations of a group of micro-batches lie in the arena in the order forward makes them:
//   [batch 0] [carried 0] [dx 0] [x_in 1, 0] [batch 1] ... [saved 1, 0] [x_in 2, 0] [saved 1, 1] ...
// and backward gives them back from the end, block by block. [saved b] is the part that the block's level of
// recomputation keeps; the other part lies behind everything, around forward and around backward of b. Where
// activations live off the device, x_in b and [saved b] lie in one array of a slot instead. It may be another
// slot in backward, so its views are made again there.
//
// Where a tied table's gradient is made last, before all of that lie what it is made of and the slot of the
// blocks' gradients; when these have ended, it takes the slot's place and what lies behind:
//   [kept 0] [kept 1] ... [slot    ] [batch 0] [dx 0] [x_in 1, 0] ...
//   [kept 0] [kept 1] ... [table's gradient                ] [batch m] [logits]
//
// Blocks before the first trained one have no backward and keep nothing: each one's output takes the place of
// its input. Where the head alone is trained there is no dx either.
struct Pass::MicroBatch {
  MicroBatch(const Context& context, DeviceBatch batch, size_t blocks, bool backward, bool train_embedding)
      : device(std::move(batch)),
        carried(allocate_carried(context, device.rows, backward, train_embedding)),
        dx(backward ? context.tensor(device.rows, context.spec.hidden) : View()),
        x_in(blocks),
        saved(blocks) {
    device.carried = &carried;
  }
  DeviceBatch device;
  Carried carried;
  View dx;                        // [T, H]: gradient of the residual stream; undefined: the head's alone
  std::vector<View> x_in;         // [T, H] per block, of those in the arena
  std::vector<BlockSaved> saved;  // per transformer block
  HeadRows head;                  // of a chunked head, behind everything else
};

namespace {

// Of the head's block: itself, or a copy that is used in its place.
bool trains_norm(const BlockLayout& block) {
  constexpr const char* kNames[] = {"norm", "norm_bias", "norm_tuned", "norm_bias_tuned"};
  return std::ranges::any_of(kNames, [&](const char* name) { return block.trains(name); });
}

}  // namespace

Pass::Pass(const Context& context, const ModelParts& model, PassMemory& memory, const StepConfig& step,
           LossSums* sums)
    : context_(context),
      binding_(model.spec, model.layout, model.adapter),
      units_(model.layout.units(step.chunked_head())),
      memory_(memory),
      config_(step),
      sums_(sums),
      head_(std::ssize(model.layout.blocks) - 1),
      first_trained_(model.layout.first_trained()),
      norm_trained_(trains_norm(model.layout.blocks.back())),
      prompt_trained_(model.layout.blocks.front().trains("prompt")),
      table_adapted_(model.layout.blocks.front().trains("embed.lora_A")),
      group_(static_cast<size_t>(step.group)),
      mark_(model.layout.blocks.size()) {
  if (step.defer_tied_gradient) take_gradient_slot(model.layout);
}

void Pass::take_gradient_slot(const ModelLayout& layout) {
  const int64_t rows = config_.micro_rows;
  for (int64_t micro = 0; micro < config_.group; ++micro) {
    HeadRows kept;
    kept.normed = context_.tensor(rows, context_.spec.hidden);
    for (View* column : {&kept.max, &kept.sum, &kept.nll}) *column = context_.tensor(rows, 1, DType::kF32);
    kept_heads_.push_back(kept);
  }
  int64_t longest = 0;
  for (size_t b = 1; b < layout.blocks.size(); ++b)
    longest = std::max(longest, layout.blocks[b].flat_elements);
  const auto size = static_cast<int64_t>(dtype_size(config_.arithmetic.gradient_dtype));
  table_bytes_ = layout.blocks.front().flat_elements * size;
  slot_mark_ = context_.arena.mark();
  gradient_slot_ = context_.arena.allocate(longest * size);
  end_mark_ = context_.arena.mark();
}

Pass::~Pass() = default;

void Pass::begin(int64_t step, int64_t micro_batches, float loss_scale) {
  step_ = step;
  micro_batches_ = micro_batches;
  loss_scale_ = loss_scale;
  inputs_kept_ = false;
}

void Pass::end() {
  if (!config_.defer_tied_gradient) return;
  context_.arena.rewind(slot_mark_);
  context_.arena.allocate(end_mark_ - slot_mark_);
}

void Pass::carry_out(const Operation& operation) {
  const int64_t block = unit(operation).block, micro = operation.micro;
  switch (operation.kind) {
    case OperationKind::kForward:
      return block == head_ ? head_forward(operation) : forward(block, micro);
    case OperationKind::kHead:
      if (micro == 0) begin_gradient(operation);
      return head(block, micro);
    case OperationKind::kRecompute:
      return recompute(block, micro);
    case OperationKind::kBackward:
      return block == head_ ? head_backward(operation) : backward(block, micro);
    case OperationKind::kTableGradient:
      return table_gradient(micro);
    default:
      LM_CHECK(false, operation_name(operation.kind));
  }
}

BindOptions Pass::options(bool training) const {
  return {.dtype = config_.arithmetic.dtype,
          .fp32_adapters = config_.arithmetic.fp32_adapters,
          .gradient_dtype = config_.arithmetic.gradient_dtype,
          .training = training,
          .seed = config_.seed,
          .step = step_};
}

Embedding Pass::embedding(const BlockMemory& memory, bool training) const {
  return binding_.embedding(memory, options(training));
}

TransformerBlock Pass::bind_block(int64_t block, bool gradient, bool training) {
  return binding_.transformer(block, memory_.borrow(block, gradient), options(training));
}

Head Pass::bind_head(bool gradient) {
  const BlockMemory memory = memory_.borrow(head_, gradient);
  const bool with_table = gradient && !config_.defer_tied_gradient;
  const Embedding tied =
      context_.spec.tied ? embedding(memory_.borrow(0, with_table), with_table) : Embedding();
  return binding_.head(memory, tied, options(gradient));
}

Norm Pass::bind_norm(bool gradient) {
  return binding_.final_norm(memory_.borrow(head_, gradient), options(gradient));
}

HeadSegment Pass::bind_segment(const Operation& operation, bool gradient) {
  return binding_.segment(unit(operation), memory_.borrow(operation.unit, gradient), options(gradient));
}

void Pass::begin_gradient(const Operation& operation) {
  if (unit(operation).elements > 0) memory_.begin_gradient(operation.unit);
}

LossOptions Pass::loss_options(int64_t micro) {
  return {.row_chunk = config_.arithmetic.row_chunk,
          .scale = loss_scale_,
          .norm_gradient = norm_trained_,
          .first = micro == 0,
          .keep = config_.defer_tied_gradient ? &kept_head(micro) : nullptr};
}

void Pass::head(int64_t block, int64_t micro) {
  const Head head = bind_head(true);
  const MicroBatch& m = at(micro);
  const View x = input(block, micro);
  const LossOptions options = loss_options(micro);
  if (context_.spec.scores()) {
    score_head(context_, head, m.device, {x, m.dx}, options,
               [&](const View& scores) { memory_.weigh(micro, scores); });
  } else if (config_.two_phases) {
    const ArenaFrame frame(context_.arena);
    HeadRows rows = head_begin(context_, head.norm, m.device, x, m.dx, options);
    head_matrix_forward(context_, head, rows, sums_, options);
    weigh(micro, rows);
    head_matrix_backward(context_, head, rows, options);
    head_finish(context_, head.norm, x, rows, m.dx, options);
  } else {
    head_loss(context_, head, m.device, {x, m.dx}, sums_, options);
  }
  if (block == config_.first_trained) end_group(micro);
}

// Between the phases each row's nll becomes its weight.
void Pass::weigh(int64_t micro, HeadRows& rows) {
  if (!config_.two_phases || rows.targets.count == 0) return;
  memory_.weigh(micro, rows.nll.row_range(0, rows.targets.count));
  rows.targets.weight = rows.nll.floats();
}

// All activations have ended, and every block's gradient.
void Pass::table_gradient(int64_t micro) {
  if (micro == 0) {
    LM_CHECK(context_.arena.mark() == end_mark_, "a table's gradient is made where activations are");
    context_.arena.rewind(slot_mark_);
    context_.arena.allocate(table_bytes_);
    memory_.begin_gradient(0);
  }
  const ArenaFrame frame(context_.arena);
  const DeviceBatch batch = memory_.place(micro);
  HeadRows rows = kept_head(micro);
  rows.targets = batch.targets;
  if (config_.two_phases) rows.targets.weight = rows.nll.floats();
  rows.normed = rows.normed.row_range(0, context_.rounded(rows.targets.count));
  const Embedding tables = embedding(memory_.borrow(0, true), true);
  head_matrix_backward(context_, {.norm = {}, .weight = tables.table}, rows, loss_options(micro));
}

bool Pass::last_of_group(int64_t micro) const {
  return (micro + 1) % config_.group == 0 || micro + 1 == micro_batches_;
}

View Pass::make_input(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  View& x = m.x_in[static_cast<size_t>(block)];
  if (!config_.inputs_off_device()) return x = context_.tensor(m.device.rows, context_.spec.hidden);
  View made = view_of(nullptr, context_.dtype, m.device.rows, context_.spec.hidden);
  made.data = memory_.make_input(block, micro, made.bytes());
  return made;
}

View Pass::input(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  if (!config_.inputs_off_device()) return m.x_in[static_cast<size_t>(block)];
  return view_of(memory_.input(block, micro), context_.dtype, m.device.rows, context_.spec.hidden);
}

void Pass::keep(const TransformerBlock& bound, int64_t block, int64_t micro, Keep how) {
  MicroBatch& m = at(micro);
  const Recompute level = config_.recompute.of(block);
  BlockSaved& saved = m.saved[static_cast<size_t>(block)];
  saved.keep_norms = config_.keep_norms;
  const auto allocate = [&](const Context& context) {
    allocate_block_saved(context, bound, m.device.rows, level, SavedPart::kKept, saved);
  };
  if (!config_.inputs_off_device()) {
    if (how == Keep::kMake) allocate(context_);
    return;
  }
  if (level == Recompute::kBlock) return allocate(context_);  // nothing
  const int64_t input_bytes = round_up(
      view_of(nullptr, context_.dtype, m.device.rows, context_.spec.hidden).bytes(), Arena::kAlignment);
  Arena counted{Arena::Counting{}};
  allocate(context_.with(counted));
  const int64_t bytes = input_bytes + counted.mark();
  std::byte* const memory =
      how == Keep::kMake ? memory_.make_input(block, micro, bytes) : memory_.input(block, micro);
  Arena placed(context_.device, memory + input_bytes, counted.mark());
  allocate(context_.with(placed));
}

void Pass::begin_micro(int64_t micro) {
  if (first_of_group(micro)) group_mark_ = context_.arena.mark();
  const bool backward = config_.first_trained < head_;
  const bool train_embedding = units_.front().elements > 0;
  group_[static_cast<size_t>(micro % config_.group)] =
      std::make_unique<MicroBatch>(context_, memory_.place(micro), mark_.size(), backward, train_embedding);
  const View x = make_input(1, micro);
  embed(embedding(memory_.borrow(0, false), true), at(micro).device, x);
}

void Pass::embed(const Embedding& tables, const DeviceBatch& batch, const View& x) const {
  embedding_forward(context_, tables, batch, x);
  if (batch.carried->inputs.defined())
    layer_inputs_forward(context_, tables.inputs, batch, x, batch.carried->inputs);
}

void Pass::forward(int64_t block, int64_t micro) {
  if (block == 0) return begin_micro(micro);
  if (block < config_.first_trained) return pass_over(block, micro);
  const auto b = static_cast<size_t>(block);
  MicroBatch& m = at(micro);
  const TransformerBlock bound = bind_block(block, false, true);
  const View x_in = input(block, micro);
  const Recompute level = config_.recompute.of(block);
  BlockSaved& saved = m.saved[b];
  if (first_of_group(micro)) mark_[b] = context_.arena.mark();
  keep(bound, block, micro, Keep::kMake);
  const View x_out = make_input(block + 1, micro);
  const ArenaFrame frame(context_.arena);
  allocate_block_saved(context_, bound, m.device.rows, level, SavedPart::kRecomputed, saved);
  block_forward(context_, bound, m.device, x_in, saved, x_out);
}

// Forward of a block that has no backward.
void Pass::pass_over(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  const ArenaFrame frame(context_.arena);
  const TransformerBlock bound = bind_block(block, false, true);
  const View x_in = input(block, micro);
  BlockSaved dropped = allocate_block_saved(context_, bound, m.device.rows);
  if (config_.inputs_off_device())
    return block_forward(context_, bound, m.device, x_in, dropped, make_input(block + 1, micro));
  const View x_out = context_.like(x_in);
  block_forward(context_, bound, m.device, x_in, dropped, x_out);
  context_.kernels.copy_rows({.from = x_out, .to = x_in}, context_.stream);
  m.x_in[static_cast<size_t>(block) + 1] = x_in;
}

void Pass::head_forward(const Operation& operation) {
  const int64_t micro = operation.micro;
  MicroBatch& m = at(micro);
  const Unit& part = unit(operation);
  if (part.segment()) {
    head_segment_forward(context_, bind_segment(operation, false), m.head, sums_, loss_options(micro));
    if (part.first_row + part.rows == context_.spec.vocab) weigh(micro, m.head);
    return;
  }
  if (first_of_group(micro)) mark_.back() = context_.arena.mark();
  m.head = head_begin(context_, bind_norm(false), m.device, input(head_, micro), m.dx, loss_options(micro));
}

void Pass::head_backward(const Operation& operation) {
  const int64_t micro = operation.micro;
  MicroBatch& m = at(micro);
  if (micro == 0) begin_gradient(operation);
  if (unit(operation).segment()) {
    return head_segment_backward(context_, bind_segment(operation, true), m.head, loss_options(micro));
  }
  head_finish(context_, bind_norm(true), input(head_, micro), m.head, m.dx, loss_options(micro));
  if (last_of_group(micro)) context_.arena.rewind(mark_.back());
  if (head_ == config_.first_trained) end_group(micro);
}

void Pass::recompute(int64_t block, int64_t micro) {
  const auto b = static_cast<size_t>(block);
  MicroBatch& m = at(micro);
  const TransformerBlock bound = bind_block(block, false, true);
  recompute_mark_ = context_.arena.mark();
  const Recompute level = config_.recompute.of(block);
  keep(bound, block, micro, Keep::kFind);
  allocate_block_saved(context_, bound, m.device.rows, level, SavedPart::kRecomputed, m.saved[b]);
  block_recompute(context_, bound, m.device, input(block, micro), level, m.saved[b]);
}

void Pass::backward(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  if (block == 0) {
    if (units_.front().elements > 0) embedding_backward(micro);
    return end_group(micro);
  }
  const auto b = static_cast<size_t>(block);
  if (micro == 0) memory_.begin_gradient(block);
  if (block + 1 == head_) zero_lent_gradients(context_, m.carried);
  const TransformerBlock bound = bind_block(block, true, true);
  if (config_.recompute.of(block) == Recompute::kNone) keep(bound, block, micro, Keep::kFind);
  block_backward(context_, bound, m.device, input(block, micro), m.saved[b],
                 {.dx = m.dx, .first = micro == 0, .want_dx = block > first_trained_});
  if (config_.recompute.of(block) != Recompute::kNone) context_.arena.rewind(recompute_mark_);
  // Inputs alone stay until the group ends: a second backward may want them.
  if (!config_.recompute.whole() && last_of_group(micro)) context_.arena.rewind(mark_[b]);
  if (block == config_.first_trained) end_group(micro);
}

// The micro-batch's last backward has been.
void Pass::end_group(int64_t micro) {
  if (!last_of_group(micro)) return;
  if (config_.keeps_inputs() && !inputs_kept_) {
    inputs_kept_ = true;
  } else {
    context_.arena.rewind(group_mark_);
  }
}

void Pass::embedding_backward(int64_t micro) {
  MicroBatch& m = at(micro);
  const View& inputs = m.carried.input_gradient;
  if (inputs.defined()) {
    if (micro == 0) memory_.begin_gradient(0);
    const Embedding tables = embedding(memory_.borrow(0, true), true);
    const ArenaFrame frame(context_.arena);
    const View x = context_.like(m.dx);
    embedding_forward(context_, tables, m.device, x);
    layer_inputs_backward(context_, tables.inputs, m.device, {x, inputs, m.dx}, micro == 0);
  }
  const DropoutMask dropout = binding_.embedding_dropout(options(true));
  if (dropout.on()) drop(context_, dropout, m.device, m.dx, m.dx);
  if (prompt_trained_) {
    if (micro == 0) memory_.begin_gradient(0);
    const Embedding tables = embedding(memory_.borrow(0, true), true);
    return prompt_backward(context_, tables, m.device, m.dx, micro == 0);
  }
  const ArenaFrame frame(context_.arena);
  View pairs;
  if (table_adapted_) {
    if (micro == 0 && !inputs.defined()) memory_.begin_gradient(0);
    const Embedding tables = embedding(memory_.borrow(0, true), true);
    pairs = table_adapter_backward(context_, tables.adapter, m.device, m.dx, micro == 0);
  }
  memory_.add_embedding_gradient(micro, {m.dx, inputs, pairs});
}

ForwardPass::ForwardPass(Pass& pass, DeviceBatch batch, bool training)
    : pass_(pass),
      training_(training),
      batch_(std::move(batch)),
      carried_(allocate_carried(pass.context_, batch_.rows, false, false)),
      x_(pass.context_.tensor(batch_.rows, pass.context_.spec.hidden)),
      y_(pass.context_.like(x_)) {
  batch_.carried = &carried_;
}

void ForwardPass::carry_out(const Operation& operation) {
  const Context& context = pass_.context_;
  const Unit& unit = pass_.unit(operation);
  if (unit.role == UnitRole::kEmbedding) {
    const Embedding tables = pass_.embedding(pass_.memory_.borrow(0, false), training_);
    return pass_.embed(tables, batch_, x_);
  }
  const ArenaFrame frame(context.arena);
  const TransformerBlock bound = pass_.bind_block(unit.block, false, training_);
  BlockSaved dropped = allocate_block_saved(context, bound, batch_.rows);
  block_forward(context, bound, batch_, x_, dropped, y_);
  std::swap(x_, y_);
}

void ForwardPass::head(const Operation& operation) {
  const Context& context = pass_.context_;
  const Unit& unit = pass_.unit(operation);
  const bool whole = operation.kind == OperationKind::kHead;
  const LossOptions options{.row_chunk = pass_.config_.arithmetic.row_chunk};
  const Head head = whole ? bind_head() : Head();
  if (!unit.segment()) rows_ = head_begin(context, whole ? head.norm : bind_norm(), batch_, x_, {}, options);
  if (context.spec.scores()) {
    if (rows_.targets.count > 0) losses_ = score_rows(context, head.weight, rows_);
    return;
  }
  if (whole) head_matrix_forward(context, head, rows_, pass_.sums_, options);
  if (unit.segment()) head_segment_forward(context, bind_segment(operation), rows_, pass_.sums_, options);
  const bool last = whole || unit.first_row + unit.rows == context.spec.vocab;
  if (last && rows_.targets.count > 0) losses_ = rows_.nll, correct_ = rows_.correct;
}

}  // namespace lm
