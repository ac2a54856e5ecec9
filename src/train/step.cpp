#include "train/step.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace lm {

// The activations of a group of micro-batches lie in the arena in the order forward makes them:
//   [batch 0] [dx 0] [x_in 1, 0] [batch 1] ... [saved 1, 0] [x_in 2, 0] [saved 1, 1] [x_in 2, 1] ...
// and backward gives them back from the end, block by block. With recomputation [saved b] exists only around
// backward of b. Inputs that live off the device lie in their slots instead.
struct TrainStep::MicroBatch {
  MicroBatch(const Context& context, const Batch& batch, int64_t blocks)
      : device(place_batch(context, batch)),
        dx(context.tensor({device.rows, context.spec.hidden})),
        x_in(static_cast<size_t>(blocks)),
        saved(static_cast<size_t>(blocks)) {}
  DeviceBatch device;
  at::Tensor dx;                  // [T, H]: gradient of the residual stream
  std::vector<at::Tensor> x_in;   // [T, H] per block; undefined in the activation store's case
  std::vector<BlockSaved> saved;  // per transformer block
  HeadRows head;                  // of a cut head, behind everything else
};

TrainStep::TrainStep(const StepParts& parts, const StepSettings& settings)
    : context_(parts.context),
      layout_(parts.layout),
      weights_(parts.weights),
      far_(parts.far),
      gradients_(parts.gradients),
      optimizer_(parts.optimizer),
      embedding_gradient_(parts.embedding_gradient),
      trace_(parts.trace),
      settings_(settings),
      head_(std::ssize(parts.layout.blocks) - 1),
      slots_(settings.transfers),
      loans_(parts.weights.units().size()),
      group_(static_cast<size_t>(settings.shape.group)),
      mark_(parts.layout.blocks.size()),
      nll_(parts.context.device, sizeof(double)),
      host_nll_(reinterpret_cast<double*>(parts.host_loss.empty() ? nll_.data() : parts.host_loss.data())) {
  LM_CHECK(parts.context.device == DeviceType::kCpu || parts.host_loss.size() >= sizeof(double), "host_loss");
}

TrainStep::~TrainStep() = default;

StepResult TrainStep::run(const StepBatches& batches, int64_t step, double lr) {
  step_ = step;
  lr_ = lr;
  loss_scale_ =
      batches.target_tokens > 0 ? static_cast<float>(1.0 / static_cast<double>(batches.target_tokens)) : 0.0F;
  if (trace_ != nullptr) trace_->begin_step(step);
  micro_batches_ = static_cast<int64_t>(batches.micro.size());
  result_ = {};
  // Without global clipping nothing is deferred: updates belong to this step from the start.
  if (settings_.clip != Clip::kGlobal) {
    update_ = {.lr = lr, .scale = 1, .step = step, .skipped = false};
    update_begun_ = false;
  }
  context_.uploads.rewind();  // the last check waited for what was sent before it
  zero_loss();
  ScheduleShape shape = settings_.shape;
  shape.micro_batches = micro_batches_;
  shape.pending = pending_;
  const StepSchedule schedule = make_schedule(shape);
  shape.pending = shape.defers();
  const StepSchedule next = settings_.transfers.any() ? make_schedule(shape) : StepSchedule{};
  const StepSchedule moved = add_transfers(schedule, next, settings_.transfers, slots_);
  const bool far = settings_.transfers.any();
  for (const Operation& operation : moved.operations) {
    if (far) far_.poll();
    execute(operation, batches);
  }
  pending_ = shape.pending;
  return result_;
}

void TrainStep::flush() {
  if (pending_) {
    ScheduleShape shape = settings_.shape;
    shape.pending = true;
    const StepSchedule list = add_transfers(make_flush_schedule(shape), {}, settings_.transfers, slots_);
    for (const Operation& operation : list.operations) execute(operation, {});
    pending_ = false;
  }
  for (int p = 0; p < kPools; ++p) {
    Store* const store = far_.store(static_cast<Pool>(p));
    for (Slot& slot : slots_.pools[static_cast<size_t>(p)]) {
      if (slot.array >= 0) {
        if (slot.changed) store->write_back(slot.array);
        store->forget(slot.array);
      }
      slot = {};
    }
  }
}

void TrainStep::carry_out(const Operation& operation, const StepBatches& batches) {
  const int64_t block = unit(operation).block, micro = operation.micro;
  switch (operation.kind) {
    case OperationKind::kAcquire:
      loans_[static_cast<size_t>(operation.unit)].emplace(weights_.acquire(operation.unit));
      break;
    case OperationKind::kRelease:
      loans_[static_cast<size_t>(operation.unit)].reset();
      break;
    case OperationKind::kForward:
      block == head_ ? head_forward(operation) : forward(block, micro, batches);
      break;
    case OperationKind::kHead:
      head(micro);
      break;
    case OperationKind::kRecompute:
      recompute(block, micro);
      break;
    case OperationKind::kBackward:
      block == head_ ? head_backward(operation) : backward(block, micro);
      break;
    case OperationKind::kReduce:
      reduce(operation);
      break;
    case OperationKind::kCheck:
      check(batches);
      break;
    case OperationKind::kUpdate:
      update(operation);
      break;
    case OperationKind::kFetch:
    case OperationKind::kClaim:
    case OperationKind::kWriteBack:
      transfer(operation);
      break;
  }
}

void TrainStep::transfer(const Operation& operation) {
  Store& store = *far_.store(operation.pool);
  switch (operation.kind) {
    case OperationKind::kFetch:
      return store.fetch(operation.array, operation.slot);
    case OperationKind::kClaim:
      return store.claim(operation.array, operation.slot);
    default:
      return store.write_back(operation.array);
  }
}

bool TrainStep::trained(int64_t block) const {
  return layout_.blocks[static_cast<size_t>(block)].flat_elements > 0;
}

BlockMemory TrainStep::borrow(int64_t unit, bool training) {
  const std::optional<Loan>& loan = loans_[static_cast<size_t>(unit)];
  LM_CHECK(loan.has_value(), "unit " + std::to_string(unit) + " is used without a loan");
  const Unit& range = weights_.units()[static_cast<size_t>(unit)];
  BlockMemory memory{loan->trainable(), loan->frozen(), nullptr, range.first, range.first_frozen_byte};
  if (training && gradients_ != nullptr && range.elements > 0) memory.gradients = gradients_->unit(unit);
  arrived();
  return memory;
}

BindOptions TrainStep::bind_options(bool training) const {
  BindOptions options = settings_.bind;
  options.training = training;
  options.step = step_;
  return options;
}

Param TrainStep::bind_embedding(bool training) {
  return bind_param(layout_.blocks[0], "embed", borrow(0, training), bind_options(training));
}

// With `training` a backward is at hand: the gradient, too, is where it can be added to.
TransformerBlock TrainStep::bind_block(int64_t block, bool training) {
  return bind_transformer(context_.spec, layout_.blocks[static_cast<size_t>(block)], block - 1,
                          borrow(block, training), bind_options(true));
}

Head TrainStep::bind_last(bool training) {
  const BlockMemory memory = borrow(head_, training);
  return bind_head(layout_.blocks.back(), memory, context_.spec.tied ? bind_embedding(training) : Param(),
                   bind_options(training));
}

Param TrainStep::bind_last_norm(bool training) {
  return bind_param(layout_.blocks.back(), "norm", borrow(head_, training), bind_options(training));
}

HeadSegment TrainStep::bind_head_segment(const Operation& operation, bool training) {
  return bind_segment(layout_.blocks.back(), unit(operation), borrow(operation.unit, training),
                      bind_options(training));
}

LossOptions TrainStep::loss_options(int64_t micro) const {
  return {.row_chunk = settings_.row_chunk, .scale = loss_scale_, .first = micro == 0};
}

bool TrainStep::last_of_group(int64_t micro) const {
  return (micro + 1) % settings_.shape.group == 0 || micro + 1 == micro_batches_;
}

int64_t TrainStep::input_array(int64_t block, int64_t micro) const {
  return (block - 1) * settings_.shape.group + micro % settings_.shape.group;
}

at::Tensor TrainStep::make_input(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  const int64_t rows = m.device.rows, hidden = context_.spec.hidden;
  if (Store* const store = far_.store(Pool::kActivations)) {
    const int64_t bytes = rows * hidden * static_cast<int64_t>(dtype_size(context_.dtype));
    store->resize(input_array(block, micro), bytes);
    return input(block, micro);
  }
  return m.x_in[static_cast<size_t>(block)] = context_.tensor({rows, hidden});
}

at::Tensor TrainStep::input(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  Store* const store = far_.store(Pool::kActivations);
  if (store == nullptr) return m.x_in[static_cast<size_t>(block)];
  std::byte* const bytes = store->use(input_array(block, micro));
  arrived();
  return view_memory(bytes, {m.device.rows, context_.spec.hidden}, context_.dtype, context_.device);
}

void TrainStep::begin_micro(int64_t micro, const StepBatches& batches) {
  if (micro == 0 && embedding_gradient_ != nullptr) {
    embedding_gradient_->begin(context_, batches.micro);
    // A tied embedding's gradient is begun by the head; an untied one consists of the step's rows alone.
    if (!context_.spec.tied) gradients_->zero(0);
  }
  if (micro % settings_.shape.group == 0) group_mark_ = context_.arena.mark();
  group_[static_cast<size_t>(micro % settings_.shape.group)] =
      std::make_unique<MicroBatch>(context_, batches.micro[static_cast<size_t>(micro)], head_ + 1);
  const at::Tensor x = make_input(1, micro);
  embedding_forward(context_, bind_embedding(false).weight, at(micro).device, x);
}

void TrainStep::forward(int64_t block, int64_t micro, const StepBatches& batches) {
  if (block == 0) return begin_micro(micro, batches);
  const auto b = static_cast<size_t>(block);
  MicroBatch& m = at(micro);
  const TransformerBlock bound = bind_block(block, false);
  const at::Tensor x_in = input(block, micro);
  if (settings_.recompute) {
    const at::Tensor x_out = make_input(block + 1, micro);
    const ArenaFrame frame(context_.arena);
    BlockSaved dropped = allocate_block_saved(context_, bound, m.device.rows);
    block_forward(context_, bound, m.device, x_in, dropped, x_out);
    return;
  }
  if (micro % settings_.shape.group == 0) mark_[b] = context_.arena.mark();
  m.saved[b] = allocate_block_saved(context_, bound, m.device.rows);
  block_forward(context_, bound, m.device, x_in, m.saved[b], make_input(block + 1, micro));
}

void TrainStep::head(int64_t micro) {
  MicroBatch& m = at(micro);
  head_loss(context_, bind_last(true), m.device, input(head_, micro), m.dx,
            reinterpret_cast<double*>(nll_.data()), loss_options(micro));
}

void TrainStep::head_forward(const Operation& operation) {
  const int64_t micro = operation.micro;
  MicroBatch& m = at(micro);
  if (unit(operation).segment()) {
    return head_segment_forward(context_, bind_head_segment(operation, false), m.head,
                                reinterpret_cast<double*>(nll_.data()), loss_options(micro));
  }
  if (micro % settings_.shape.group == 0) mark_.back() = context_.arena.mark();
  m.head = head_begin(context_, bind_last_norm(false), m.device, input(head_, micro), m.dx);
}

void TrainStep::head_backward(const Operation& operation) {
  const int64_t micro = operation.micro;
  MicroBatch& m = at(micro);
  if (micro == 0 && trained(head_)) gradients_->begin(operation.unit);
  if (unit(operation).segment()) {
    return head_segment_backward(context_, bind_head_segment(operation, true), m.head, loss_options(micro));
  }
  head_finish(context_, bind_last_norm(true), input(head_, micro), m.head, m.dx, loss_options(micro));
  if (last_of_group(micro)) context_.arena.rewind(mark_.back());
}

void TrainStep::recompute(int64_t block, int64_t micro) {
  const auto b = static_cast<size_t>(block);
  MicroBatch& m = at(micro);
  const TransformerBlock bound = bind_block(block, false);
  recompute_mark_ = context_.arena.mark();
  m.saved[b] = allocate_block_saved(context_, bound, m.device.rows);
  block_forward(context_, bound, m.device, input(block, micro), m.saved[b], {});
}

void TrainStep::backward(int64_t block, int64_t micro) {
  MicroBatch& m = at(micro);
  if (block == 0) {
    if (embedding_gradient_ != nullptr) embedding_gradient_->add(context_, static_cast<size_t>(micro), m.dx);
    if (last_of_group(micro)) context_.arena.rewind(group_mark_);
    return;
  }
  const auto b = static_cast<size_t>(block);
  if (micro == 0) gradients_->begin(block);
  const bool want_dx = block > 1 || embedding_gradient_ != nullptr;
  block_backward(context_, bind_block(block, true), m.device, input(block, micro), m.saved[b], m.dx,
                 micro == 0, want_dx);
  if (settings_.recompute) {
    context_.arena.rewind(recompute_mark_);
  } else if (last_of_group(micro)) {
    context_.arena.rewind(mark_[b]);
  }
}

void TrainStep::reduce(const Operation& operation) {
  if (!trained(unit(operation).block)) return;
  if (unit(operation).role == UnitRole::kEmbedding) {
    const BlockMemory memory{nullptr, nullptr, gradients_->unit(0)};
    embedding_gradient_->finish(context_,
                                bind_param(layout_.blocks[0], "embed", memory, bind_options(true)).gradient);
  }
  gradients_->reduce(operation.unit);
}

void TrainStep::check(const StepBatches& batches) {
  gradients_->send_squares();
  const double nll = read_loss();  // the step's one wait
  result_.loss = batches.target_tokens > 0 ? nll / static_cast<double>(batches.target_tokens) : 0.0;
  result_.grad_norm = std::sqrt(gradients_->total_square());
  result_.skipped = !std::isfinite(result_.loss) || !std::isfinite(result_.grad_norm);
  if (settings_.clip != Clip::kGlobal) return;
  update_ = {.lr = lr_,
             .scale = clip_factor(result_.grad_norm, settings_.max_grad_norm),
             .step = step_,
             .skipped = result_.skipped};
  update_begun_ = false;
}

// Without global clipping: the block's own norm decides.
float TrainStep::block_scale(int64_t block) const {
  const double norm = std::sqrt(gradients_->block_square(block));
  if (!std::isfinite(norm)) {
    throw Error(Exit::kNumerics,
                {.area = "NUM-12",
                 .what = "the gradient of " + layout_.blocks[static_cast<size_t>(block)].name +
                         " is not finite, and blocks before it are already updated",
                 .place = "step " + std::to_string(step_),
                 .next = "lower optimizer.lr, or set optimizer.clip = \"global\", which skips such "
                         "a step",
                 .kept = ""});
  }
  return settings_.clip == Clip::kBlock ? clip_factor(norm, settings_.max_grad_norm) : 1.0F;
}

void TrainStep::update(const Operation& operation) {
  const int64_t u = operation.unit, tile = operation.tile;
  const ScheduleUnit& scheduled = settings_.shape.unit(u);
  const int64_t block = scheduled.block;
  if (update_.skipped || !trained(block)) return;
  if (!update_begun_) {
    optimizer_->begin_update();
    update_begun_ = true;
  }
  // A cut head's updates begin with the final norm.
  const bool first = !unit(operation).segment() && tile == scheduled.first_tile;
  if (settings_.clip != Clip::kGlobal && first) update_.scale = block_scale(block);
  const Unit& range = unit(operation);
  const UpdateInputs inputs{.weights = weights_.trainable_home(u),
                            .gradients = gradients_->unit(u),
                            .gradient_dtype = gradients_->dtype(),
                            .gradient_scale = update_.scale,
                            .lr = update_.lr,
                            .step = update_.step,
                            // The check or the block's norm has waited for everything that is near; what
                            // comes through slots of the device is only on its way.
                            .ready = !weights_.streamed(u) && !gradients_->streamed(u),
                            .first = range.first,
                            .elements = range.elements};
  const bool cut = scheduled.role == UnitRole::kFinalNorm || scheduled.role == UnitRole::kVocabularySegment;
  const bool whole = !scheduled.off_device && !cut;
  whole ? optimizer_->update(block, inputs) : optimizer_->update_tile(block, tile, inputs);
  if (tile + 1 == scheduled.end_tile) weights_.advance(u);
}

void TrainStep::walk_forward(const Batch& batch, const HeadVisitor& head) {
  flush();
  const ArenaFrame frame(context_.arena);
  const DeviceBatch device = place_batch(context_, batch);
  const int64_t hidden = context_.spec.hidden;
  // Two boundaries take turns: block b reads one and writes the other.
  at::Tensor x = context_.tensor({device.rows, hidden}), y = context_.tensor({device.rows, hidden});
  TransferShape transfers;  // of the weights alone
  transfers.units = settings_.transfers.units;
  transfers.pool(Pool::kWeights) = settings_.transfers.pool(Pool::kWeights);
  SlotState slots(transfers);
  const StepSchedule list =
      add_transfers(make_evaluation_schedule({.units = settings_.shape.units, .tied = context_.spec.tied}),
                    {}, transfers, slots);
  for (const Operation& operation : list.operations) {
    const bool computes = operation.kind == OperationKind::kForward || operation.kind == OperationKind::kHead;
    if (!computes) {
      execute(operation, {});
    } else if (unit(operation).block == head_) {
      head(operation, device, x);
    } else if (unit(operation).role == UnitRole::kEmbedding) {
      embedding_forward(context_, bind_embedding(false).weight, device, x);
    } else {
      const ArenaFrame inner(context_.arena);
      const int64_t block = unit(operation).block;
      const TransformerBlock bound =
          bind_transformer(context_.spec, layout_.blocks[static_cast<size_t>(block)], block - 1,
                           borrow(operation.unit, false), bind_options(false));
      BlockSaved dropped = allocate_block_saved(context_, bound, device.rows);
      block_forward(context_, bound, device, x, dropped, y);
      std::swap(x, y);
    }
  }
  for (const Slot& slot : slots.pools[static_cast<size_t>(Pool::kWeights)]) {
    if (slot.array >= 0) far_.store(Pool::kWeights)->forget(slot.array);
  }
}

void TrainStep::zero_loss() {
  zero_bytes(nll_.data(), nll_.size(), context_.stream);
}

double TrainStep::read_loss() {
  if (context_.device == DeviceType::kCuda) copy_bytes(host_nll_, nll_.data(), nll_.size(), context_.stream);
  synchronize(context_.stream);
  return *host_nll_;
}

double TrainStep::evaluate(const Batch& batch) {
  context_.uploads.rewind();
  zero_loss();
  auto* const nll_sum = reinterpret_cast<double*>(nll_.data());
  const LossOptions options{.row_chunk = settings_.row_chunk, .scale = 1, .first = false};
  HeadRows rows;
  walk_forward(batch, [&](const Operation& operation, const DeviceBatch& device, const at::Tensor& x) {
    if (operation.kind == OperationKind::kHead) {
      head_loss(context_, bind_last(false), device, x, {}, nll_sum, options);
    } else if (!unit(operation).segment()) {
      rows = head_begin(context_, bind_last_norm(false), device, x, {});
    } else {
      head_segment_forward(context_, bind_head_segment(operation, false), rows, nll_sum, options);
    }
  });
  return read_loss();
}

std::vector<float> TrainStep::logits(const Batch& batch, const std::vector<int32_t>& rows) {
  const auto count = static_cast<int64_t>(rows.size()), vocab = context_.spec.vocab;
  at::Tensor normed, out;
  context_.uploads.rewind();  // whoever came before has waited, as this does at its end
  walk_forward(batch, [&](const Operation& operation, const DeviceBatch&, const at::Tensor& x) {
    if (unit(operation).segment())
      return head_segment_logits(bind_head_segment(operation, false), normed, out);
    const at::Tensor index = context_.tensor({count}, DType::kI32);
    context_.uploads.send(index.data_ptr(), rows.data(), count * 4, context_.stream);
    const at::Tensor picked = context_.tensor({count, context_.spec.hidden});
    out = at::empty({count, vocab}, x.options());
    context_.kernels.gather_rows({.table = x.data_ptr(),
                                  .index = index.data_ptr<int32_t>(),
                                  .out = picked.data_ptr(),
                                  .rows = count,
                                  .width = context_.spec.hidden,
                                  .dtype = context_.dtype},
                                 context_.stream);
    if (operation.kind == OperationKind::kHead) return head_logits(context_, bind_last(false), picked, out);
    normed = head_normed(context_, bind_last_norm(false), picked);
  });
  const at::Tensor host = out.to(at::kCPU, at::kFloat);
  return {host.data_ptr<float>(), host.data_ptr<float>() + host.numel()};
}

}  // namespace lm
