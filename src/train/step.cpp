#include "train/step.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace lm {
namespace {

std::string fault_text(const std::optional<NonFinite>& gradient, double loss) {
  if (gradient) return "tensor " + gradient->tensor + " grad " + gradient->kind;
  return std::isnan(loss) ? "loss nan" : "loss inf";
}

}  // namespace

TrainStep::TrainStep(const StepParts& parts, const StepSettings& settings)
    : context_(parts.context),
      layout_(parts.layout),
      weights_(parts.weights),
      off_device_(parts.off_device),
      gradients_(parts.gradients),
      optimizer_(parts.optimizer),
      embedding_gradient_(parts.embedding_gradient),
      trace_(parts.trace),
      settings_(settings),
      head_(std::ssize(parts.layout.blocks) - 1),
      slots_(settings.transfers),
      loans_(parts.weights.units().size()),
      nll_(parts.context.device, sizeof(double)),
      host_nll_(reinterpret_cast<double*>(parts.host_loss.empty() ? nll_.data() : parts.host_loss.data())),
      pass_(parts.context, parts.layout, settings.adapter, *this, settings.pass, nll_sum()) {
  LM_CHECK(parts.context.device == DeviceType::kCpu || parts.host_loss.size() >= sizeof(double), "host_loss");
  LM_CHECK(settings.shape.ranks == 1, "a step of " + std::to_string(settings.shape.ranks) + " ranks");
}

StepResult TrainStep::run(const StepBatches& batches, int64_t step, double lr) {
  step_ = step;
  lr_ = lr;
  batches_ = &batches;
  if (trace_ != nullptr) trace_->begin_step(step);
  const int64_t micro_batches = std::ssize(batches.micro);
  const double divisor = batches.divisor();
  pass_.begin(step, micro_batches, divisor > 0 ? static_cast<float>(1.0 / divisor) : 0.0F);
  result_ = {};
  // Without global clipping nothing is deferred: updates belong to this step from the start.
  if (settings_.clip != Clip::kGlobal) {
    update_ = {.lr = lr, .scale = 1, .step = step, .skipped = false};
    update_begun_ = false;
  }
  context_.uploads.rewind();  // the last check waited for what was sent before it
  zero_loss();
  ScheduleShape shape = settings_.shape;
  shape.micro_batches = micro_batches;
  shape.pending = pending_;
  const StepSchedule schedule = make_schedule(shape);
  shape.pending = shape.defers();
  const StepSchedule next = settings_.transfers.any() ? make_schedule(shape) : StepSchedule{};
  const StepSchedule list = add_transfers(schedule, next, settings_.transfers, slots_);
  const bool transfers = settings_.transfers.any();
  for (const Operation& operation : list.operations) {
    if (transfers) off_device_.poll();
    execute(operation);
  }
  pending_ = shape.pending;
  batches_ = nullptr;
  return result_;
}

void TrainStep::flush() {
  if (pending_) {
    ScheduleShape shape = settings_.shape;
    shape.pending = true;
    const StepSchedule list = add_transfers(make_flush_schedule(shape), {}, settings_.transfers, slots_);
    for (const Operation& operation : list.operations) execute(operation);
    pending_ = false;
  }
  for (int p = 0; p < kPools; ++p) {
    Store* const store = off_device_.store(static_cast<Pool>(p));
    for (Slot& slot : slots_.pools[static_cast<size_t>(p)]) {
      if (slot.array >= 0) {
        if (slot.changed) store->write_back(slot.array);
        store->forget(slot.array);
      }
      slot = {};
    }
    if (store != nullptr) store->flush();
  }
}

void TrainStep::carry_out(const Operation& operation) {
  switch (operation.kind) {
    case OperationKind::kAcquire:
      loans_[static_cast<size_t>(operation.unit)].emplace(weights_.acquire(operation.unit));
      break;
    case OperationKind::kRelease:
      loans_[static_cast<size_t>(operation.unit)].reset();
      break;
    case OperationKind::kForward:
    case OperationKind::kHead:
    case OperationKind::kRecompute:
    case OperationKind::kBackward:
      pass_.carry_out(operation);
      break;
    case OperationKind::kNorm:
      norm(operation);
      break;
    case OperationKind::kExchange:
      LM_CHECK(false, operation_name(operation.kind));
    case OperationKind::kCheck:
      check();
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
  Store& store = *off_device_.store(operation.pool);
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

BlockMemory TrainStep::borrow(int64_t unit, bool gradient) {
  const std::optional<Loan>& loan = loans_[static_cast<size_t>(unit)];
  LM_CHECK(loan.has_value(), "unit " + std::to_string(unit) + " is used without a loan");
  const Unit& range = weights_.units()[static_cast<size_t>(unit)];
  BlockMemory memory{loan->trainable(), loan->frozen(), nullptr, range.first, range.first_frozen_byte};
  if (gradient && gradients_ != nullptr && range.elements > 0) memory.gradients = gradients_->unit(unit);
  arrived();
  return memory;
}

int64_t TrainStep::input_array(int64_t block, int64_t micro) const {
  return (block - 1) * settings_.shape.group + micro % settings_.shape.group;
}

std::byte* TrainStep::make_input(int64_t block, int64_t micro, int64_t bytes) {
  off_device_.store(Pool::kActivations)->resize(input_array(block, micro), bytes);
  return input(block, micro);
}

std::byte* TrainStep::input(int64_t block, int64_t micro) {
  std::byte* const bytes = off_device_.store(Pool::kActivations)->use(input_array(block, micro));
  arrived();
  return bytes;
}

DeviceBatch TrainStep::place(int64_t micro) {
  if (micro == 0 && embedding_gradient_ != nullptr) {
    embedding_gradient_->begin(context_, batches_->micro);
    // A tied embedding's gradient is begun by the head; an untied one consists of the step's rows alone.
    if (!context_.spec.tied) gradients_->zero(0);
  }
  return place_batch(context_, batches_->micro[static_cast<size_t>(micro)]);
}

void TrainStep::add_embedding_gradient(int64_t micro, const View& dx) {
  embedding_gradient_->add(context_, static_cast<size_t>(micro), dx);
}

void TrainStep::norm(const Operation& operation) {
  if (!trained(unit(operation).block)) return;
  if (unit(operation).role == UnitRole::kEmbedding) {
    const BlockMemory memory{nullptr, nullptr, gradients_->unit(0)};
    embedding_gradient_->finish(context_, pass_.embedding(memory, true).gradient);
  }
  gradients_->granule_norms(operation.unit);
}

void TrainStep::check() {
  gradients_->send_squares();
  const double nll = read_loss();  // the step's one wait
  const double divisor = batches_->divisor();
  result_.loss = divisor > 0 ? nll / divisor : 0.0;
  result_.grad_norm = std::sqrt(gradients_->total_square());
  result_.skipped = !std::isfinite(result_.loss) || !std::isfinite(result_.grad_norm);
  if (result_.skipped) result_.fault = fault_text(gradients_->find_non_finite(), result_.loss);
  if (settings_.clip != Clip::kGlobal) {
    if (result_.skipped) fail_step(result_.fault);
    return;
  }
  update_ = {.lr = lr_,
             .scale = clip_factor(result_.grad_norm, settings_.max_grad_norm),
             .step = step_,
             .skipped = result_.skipped};
  update_begun_ = false;
}

// Without global clipping: the block's own norm decides.
float TrainStep::block_scale(int64_t block) const {
  const double norm = std::sqrt(gradients_->block_square(block));
  if (!std::isfinite(norm)) fail_step(fault_text(gradients_->find_non_finite(block), 0));
  return settings_.clip == Clip::kBlock ? clip_factor(norm, settings_.max_grad_norm) : 1.0F;
}

void TrainStep::fail_step(const std::string& fault) const {
  throw Error(Exit::kNumerics,
              {.area = "NUM-12",
               .what = "step " + std::to_string(step_) + " rank 0 " + fault +
                       ", and other blocks may already be updated",
               .place = "",
               .next = "lower optimizer.lr, or set optimizer.clip = \"global\", which skips such a step",
               .kept = "what was saved before this step"});
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
                            // The check or the block's norm has waited for everything on the device; what
                            // comes through slots of the device is only on its way.
                            .ready = !weights_.through_slots(u) && !gradients_->through_slots(u),
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
  ForwardPass pass(pass_, place_batch(context_, batch));
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
      execute(operation);
    } else if (unit(operation).block == head_) {
      head(operation, pass);
    } else {
      pass.carry_out(operation);
    }
  }
  for (const Slot& slot : slots.pools[static_cast<size_t>(Pool::kWeights)]) {
    if (slot.array >= 0) off_device_.store(Pool::kWeights)->forget(slot.array);
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
  walk_forward(batch, [](const Operation& operation, ForwardPass& pass) { pass.head(operation); });
  return read_loss();
}

std::vector<float> TrainStep::logits(const Batch& batch, const std::vector<int32_t>& rows) {
  const auto count = static_cast<int64_t>(rows.size()), vocab = context_.spec.vocab;
  const int64_t bytes = count * vocab * static_cast<int64_t>(dtype_size(context_.dtype));
  const Memory memory(context_.device, bytes);
  const View out = view_of(memory.data(), context_.dtype, count, vocab);
  View normed;
  context_.uploads.rewind();  // whoever came before has waited, as this does at its end
  walk_forward(batch, [&](const Operation& operation, ForwardPass& pass) {
    if (unit(operation).segment()) {
      return head_segment_logits(context_, pass.bind_segment(operation), normed, out);
    }
    const View index = context_.tensor(count, 1, DType::kI32);
    context_.uploads.send(index.data, rows.data(), count * 4, context_.stream);
    const View picked = context_.tensor(count, context_.spec.hidden);
    context_.kernels.gather_rows({.table = pass.x().data,
                                  .index = static_cast<const int32_t*>(index.data),
                                  .out = picked.data,
                                  .rows = count,
                                  .width = context_.spec.hidden,
                                  .dtype = context_.dtype},
                                 context_.stream);
    if (operation.kind == OperationKind::kHead) return head_logits(context_, pass.bind_head(), picked, out);
    normed = head_normed(context_, pass.bind_norm(), picked);
  });
  // From bf16 by the same kernel that adds gradients.
  std::vector<float> floats(static_cast<size_t>(count * vocab));
  std::vector<std::byte> host(static_cast<size_t>(bytes));
  copy_bytes(host.data(), out.data, bytes, context_.stream);
  synchronize(context_.stream);
  kernels(DeviceType::kCpu)
      .accumulate({.to = floats.data(),
                   .from = host.data(),
                   .elements = count * vocab,
                   .to_dtype = DType::kF32,
                   .from_dtype = context_.dtype,
                   .overwrite = true},
                  StreamView{});
  return floats;
}

}  // namespace lm
