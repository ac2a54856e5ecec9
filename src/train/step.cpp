#include "train/step.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "optim/shards.h"

namespace lm {
TrainStep::TrainStep(const StepParts& parts, StepConfig config)
    : context_(parts.context),
      layout_(parts.model.layout),
      weights_(parts.weights),
      off_device_(parts.off_device),
      gradients_(parts.gradients),
      optimizer_(parts.optimizer),
      embedding_gradient_(parts.embedding_gradient),
      group_(parts.group),
      device_group_(parts.device_group),
      trace_(parts.trace),
      progress_counter_(parts.progress_counter),
      objective_(parts.objective),
      head_(std::ssize(parts.model.layout.blocks) - 1),
      lists_(std::move(config)),
      config_(lists_.config()),
      loans_(parts.weights.units().size()),
      gathers_("gather of weights of unit", loans_.size()),
      sums_(parts.context.device, sizeof(StepSums)),
      host_sums_(
          reinterpret_cast<StepSums*>(parts.host_sums.empty() ? sums_.data() : parts.host_sums.data())),
      routed_(parts.context, parts.model.layout, parts.weights, parts.off_device.store(Pool::kWeights),
              parts.host_starts),
      pass_(parts.context, parts.model, *this, config_, &sums()->loss) {
  LM_CHECK(parts.context.device == DeviceType::kCpu || parts.host_sums.size() >= sizeof(StepSums),
           "host_sums");
  for (size_t u = 0; u < loans_.size(); ++u) gathered_.emplace_back(parts.context.device);
  routed_.expect_tokens(tokens_at_once());
  LM_CHECK(config_.ranks == parts.group.ranks(), "the plan is for another number of ranks");
  if (layout_.experts.parallel())
    rank_experts_.emplace(device_group_, context_.stream, layout_.experts, context_.spec.layer_count(),
                          context_.spec.hidden * static_cast<int64_t>(dtype_size(context_.dtype)));
  if (gradients_ != nullptr && Routers::any(parts.model.spec))
    routers_.emplace(parts.model.spec, context_.device, group_.ranks(), group_.rank());
  if (decides_on_device())
    decision_.emplace(*gradients_, context_.kernels, context_.stream, parts.host_decisions);
  if (gradients_ != nullptr && pass_.gradient_slot() != nullptr) gradients_->lend_slot(pass_.gradient_slot());
}

// The host decides where it has to: about other ranks' losses and norms, before state that moves (what is
// read of a disk, what the CPU updates), block by block, and for objectives of its own.
bool TrainStep::decides_on_device() const {
  return context_.device == DeviceType::kCuda && gradients_ != nullptr && optimizer_ != nullptr &&
         config_.may_run_ahead() && gradients_->resident() && !optimizer_->updates_on_host() &&
         objective_.weigh == nullptr && objective_.score == nullptr && objective_.columns.empty();
}

StepResult TrainStep::run(const StepBatches& batches, int64_t step, double lr, double loss_scale) {
  start(batches, step, lr, loss_scale);
  StepResult result = finish();
  LM_CHECK(finished_.empty() && started_.empty(), "an earlier step has not been finished");
  return result;
}

void TrainStep::start(const StepBatches& batches, int64_t step, double lr, double loss_scale) {
  LM_CHECK(loss_scale == 1 || config_.clip == Clip::kGlobal, "a block is updated before overflows are found");
  step_ = step;
  lr_ = lr;
  loss_scale_ = loss_scale;
  batches_ = &batches;
  if (trace_ != nullptr) trace_->begin_step(step);
  if (progress_counter_ != nullptr) progress_counter_->begin_step(step);
  const int64_t micro_batches = std::ssize(batches.micro);
  const double divisor = batches.divisor();
  pass_.begin(step, micro_batches, divisor > 0 ? static_cast<float>(loss_scale / divisor) : 0.0F);
  result_ = {};
  columns_.assign(objective_.columns.size(), 0);
  // Without global clipping nothing is deferred: updates belong to this step from the start.
  if (config_.clip != Clip::kGlobal) {
    update_ = {.lr = lr, .scale = 1, .step = step, .skipped = false};
    update_begun_ = false;
  }
  context_.uploads.rewind();  // whoever has read the results before the last has waited for them
  zero_loss();
  begin_routers();
  const bool transfers = config_.uses_slots();
  const StepSchedule& list = lists_.step(micro_batches);
  const WalkedList walked(progress_counter_);
  for (const Operation& operation : list.operations) {
    walked.begin(operation);
    if (transfers) off_device_.poll();
    watch_routers(operation);
    execute(operation);
  }
  pass_.end();
  batches_ = nullptr;
  if (config_.two_pass_clip()) wait_for_group();  // a second backward has sent and exchanged since the check
  result_.routed = routed_.take_counts();
  if (!decision_) finished_.push_back(std::move(result_));
}

// What moves in the group's stream may fail after a step's check: the others then go on without it.
void TrainStep::wait_for_group() {
  device_group_.end_before(context_.stream);
  synchronize(context_.stream);
  device_group_.check();
}

void TrainStep::flush() {
  if (lists_.pending()) {
    const StepSchedule list = lists_.flush();
    const WalkedList walked(progress_counter_);
    for (const Operation& operation : list.operations) {
      walked.begin(operation);
      execute(operation);
    }
  }
  const SlotState slots = lists_.take_slots();
  for (int p = 0; p < kPools; ++p) {
    Store* const store = off_device_.store(static_cast<Pool>(p));
    for (const Slot& slot : slots.pools[static_cast<size_t>(p)]) {
      if (slot.array < 0) continue;
      if (slot.changed) store->write_back(slot.array);
      store->forget(slot.array);
    }
    if (store != nullptr) store->flush();
  }
  if (&device_group_ != &group_) wait_for_group();
  if (save_ != nullptr) save_->flushed();
}

std::unique_ptr<StepSave> TrainStep::begin_save(const StepSaveSetup& setup) {
  LM_CHECK(started_.empty(), "a save of a step that may yet be skipped");
  // Without global clipping the next updates come before any check.
  const bool rides = config_.clip == Clip::kGlobal && !(lists_.pending() && update_.skipped);
  const bool tiles = std::ranges::any_of(config_.units, &ScheduleUnit::off_device);
  if (!rides || (tiles && !lists_.pending())) flush();
  auto save = std::make_unique<StepSave>(
      setup, StepSave::State{.weights = weights_,
                             .optimizer = *optimizer_,
                             .stream = context_.stream,
                             .gathers = device_group_.stream(context_.stream),
                             .units = config_.units,
                             .rides = rides,
                             .pending = lists_.pending(),
                             .step = update_.step,
                             .updates = optimizer_->t() + (lists_.pending() && !update_begun_ ? 1 : 0)});
  save_ = save.get();
  return save;
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
    case OperationKind::kTableGradient:
      pass_.carry_out(operation);
      break;
    case OperationKind::kAddRows:
      add_rows();
      break;
    case OperationKind::kReduceScatter:
      if (unit(operation).elements > 0)
        gradients_->reduce_scatter(operation.unit, device_group_, config_.sharding(), config_.machine_ranks);
      break;
    case OperationKind::kNorm:
      norm(operation);
      break;
    case OperationKind::kGather:
      gather(operation);
      break;
    case OperationKind::kCheck:
      check();
      if (save_ != nullptr) save_->wait_beside();  // updates follow
      break;
    case OperationKind::kUpdate:
      update(operation);
      break;
    case OperationKind::kFetch:
    case OperationKind::kAllocateSlot:
    case OperationKind::kWriteBack:
      transfer(operation);
      break;
  }
}

void TrainStep::transfer(const Operation& operation) {
  Store& store = *off_device_.store(operation.pool);
  if (operation.kind != OperationKind::kWriteBack) {
    std::vector<int64_t>& arrays = in_slots_[static_cast<size_t>(operation.pool)];
    const auto slot = static_cast<size_t>(operation.slot);
    if (slot >= arrays.size()) arrays.resize(slot + 1, -1);
    const int64_t before = std::exchange(arrays[slot], operation.array);
    if (save_ != nullptr && before >= 0) save_->take_back(operation.pool, before);
  }
  if (operation.kind == OperationKind::kFetch && operation.pool == Pool::kWeights)
    return routed_.fetch(operation.array, operation.slot);
  if (operation.kind == OperationKind::kFetch) return store.fetch(operation.array, operation.slot);
  if (operation.kind == OperationKind::kAllocateSlot)
    return store.allocate_slot(operation.array, operation.slot);
  store.write_back(operation.array);
}

BlockMemory TrainStep::borrow(int64_t unit, bool gradient) {
  const std::optional<Loan>& loan = loans_[static_cast<size_t>(unit)];
  LM_CHECK(loan.has_value(), fmt::format("unit {} is used without a loan", unit));
  const Unit& range = weights_.units()[static_cast<size_t>(unit)];
  gathered_[static_cast<size_t>(unit)].wait(context_.stream);
  BlockMemory memory{.trainable = loan->trainable(),
                     .frozen = loan->frozen(),
                     .own = loan->own(),
                     .first = range.first,
                     .first_frozen_byte = range.first_frozen_byte,
                     .first_own_byte = range.common_bytes()};
  if (gradient && gradients_ != nullptr && range.elements > 0) memory.gradients = gradients_->unit(unit);
  if (save_ != nullptr) save_->used(unit, memory.trainable);
  memory.experts = routed_.of(unit);
  if (rank_experts_) memory.exchange = &*rank_experts_;
  arrived();
  return memory;
}

std::byte* TrainStep::make_input(int64_t block, int64_t micro, int64_t bytes) {
  off_device_.store(Pool::kActivations)->resize(config_.input_array(block, micro), bytes);
  return input(block, micro);
}

std::byte* TrainStep::input(int64_t block, int64_t micro) {
  std::byte* const bytes = off_device_.store(Pool::kActivations)->use(config_.input_array(block, micro));
  arrived();
  return bytes;
}

namespace {

// A micro-batch without a target fills up a rank that has fewer than another (data/batching.h): it is no part
// of the step, and its tokens' choices are nobody's.
void watch(Routers* routers, DeviceBatch& batch) {
  if (batch.targets.count > 0) batch.routers = routers;
}

}  // namespace

DeviceBatch TrainStep::place(int64_t micro) {
  DeviceBatch out = place_batch(context_, batches_->micro[static_cast<size_t>(micro)]);
  if (routers_) watch(&*routers_, out);
  return out;
}

void TrainStep::add_embedding_gradient(int64_t micro, const RowGradients& of) {
  if (micro == 0) embedding_gradient_->begin(context_, batches_->micro);
  embedding_gradient_->add(context_, static_cast<size_t>(micro), of);
}

void TrainStep::add_rows() {
  if (weights_.units().front().elements == 0) return;
  if (layout_.blocks.front().trains("prompt")) return;  // complete, and beside it every table is frozen
  // A tied embedding's gradient, or its chosen rows', is begun by the head; others consist of the step's rows
  // alone. What projects layers' inputs, and A of an adapter, have their gradients already.
  const bool adapted = layout_.blocks.front().trains("embed.lora_A");
  const bool tied = context_.spec.tied, rows_alone = !tied && !config_.layer_inputs && !adapted;
  if (rows_alone) gradients_->zero(0);  // first: it takes the slot for the embedding's
  const BlockMemory memory{.gradients = gradients_->unit(0)};
  const Embedding embedding = pass_.embedding(memory, true);
  const auto zero = [&](const View& gradient) {
    if (gradient.defined() && !rows_alone) context_.kernels.zero(gradient, context_.stream);
  };
  if (!tied) zero(embedding.table.gradient), zero(embedding.tokens.rows.gradient);
  zero(embedding.adapter.b.gradient);
  zero(embedding.positions.gradient);
  zero(embedding.inputs.table.gradient);
  embedding_gradient_->finish(context_, embedding);
}

void TrainStep::norm(const Operation& operation) {
  if (unit(operation).elements > 0)
    gradients_->granule_norms(operation.unit, device_group_, config_.sharding());
}

void TrainStep::gather(const Operation& operation) {
  const Unit& range = unit(operation);
  if (update_.skipped || range.elements == 0) return;
  const char* const what = gathers_.of(operation.unit);
  const std::vector<ByteRange> shards =
      shard_bytes(range, config_.sharding(), static_cast<int64_t>(dtype_size(weights_.dtype())));
  std::byte* const weights = weights_.trainable_in_place(operation.unit);
  if (weights_.in_host_memory(operation.unit)) {
    synchronize(context_.stream);
    return group_.all_gather(what, weights, shards);
  }
  device_group_.begin_after(context_.stream);
  device_group_.all_gather(what, weights, shards);
  // The slot's copies follow compute.
  if (weights_.trained_through_slots(operation.unit)) return device_group_.end_before(context_.stream);
  gathered_[static_cast<size_t>(operation.unit)].record(device_group_.stream(context_.stream));
}

// Of the block. A chunked head's updates begin with the final norm; if that is frozen, with the first
// segment.
bool TrainStep::first_update(const Operation& operation) const {
  if (operation.tile != config_.unit(operation.unit).first_tile) return false;
  const Unit& range = unit(operation);
  return !range.segment() ||
         (range.first_row == 0 && weights_.units()[static_cast<size_t>(head_)].elements == 0);
}

void TrainStep::update(const Operation& operation) {
  const int64_t u = operation.unit, tile = operation.tile;
  const ScheduleUnit& scheduled = config_.unit(u);
  const int64_t block = scheduled.block;
  if (update_.skipped) explain_skip(block);
  const Unit& range = unit(operation);
  if (update_.skipped || range.elements == 0) return;
  if (!update_begun_) {
    optimizer_->begin_update();
    update_begun_ = true;
  }
  const bool first = first_update(operation);
  if (config_.clip != Clip::kGlobal && first) update_.scale = block_scale(block);
  // A second backward's gradient has been exchanged since the check.
  if (config_.two_pass_clip() && first) device_group_.end_before(context_.stream);
  const UpdateInputs inputs{
      .weights = weights_.trainable_in_place(u),
      .gradients = gradients_->unit(u),
      .gradient_dtype = gradients_->dtype(),
      .gradient_scale = update_.scale,
      .decision = decision_ ? decision_->on_device() : nullptr,
      .lr = update_.lr,
      .step = update_.step,
      // The check or the block's norm has waited for everything on the device; what comes through slots of
      // the device, or from a second backward, is only on its way.
      .ready = !decision_ && !weights_.through_slots(u) && !gradients_->through_slots(u) &&
               !config_.two_pass_clip(),
      .first = range.first,
      .elements = range.elements};
  const bool cut = scheduled.role == UnitRole::kFinalNorm || scheduled.role == UnitRole::kVocabularySegment;
  const bool whole = !scheduled.off_device && !cut;
  whole ? optimizer_->update(block, inputs) : optimizer_->update_tile(block, tile, inputs);
  if (save_ != nullptr) save_->updated(u, tile, update_.step);
  if (tile + 1 == scheduled.end_tile) weights_.advance(u);
}

void TrainStep::walk_forward(const Batch& batch, const HeadVisitor& head,
                             std::span<const KeyValueCache* const> caches, Routers* routers) {
  flush();
  const ArenaFrame frame(context_.arena);
  DeviceBatch placed = place_batch(context_, batch, caches);
  watch(routers, placed);
  ForwardPass pass(pass_, std::move(placed), routers != nullptr);
  routed_.expect_tokens(batch.tokens() * layout_.experts.ranks);
  const ListWithSlots& forward = lists_.evaluation();
  const WalkedList walked(progress_counter_);
  for (const Operation& operation : forward.list.operations) {
    walked.begin(operation);
    if (!computes(operation.kind)) {
      execute(operation);
    } else if (unit(operation).block == head_) {
      head(operation, pass);
    } else {
      pass.carry_out(operation);
    }
  }
  routed_.expect_tokens(tokens_at_once());
  for (size_t p = 0; p < kPools; ++p) {
    for (const Slot& slot : forward.slots.pools[p])
      if (slot.array >= 0) off_device_.store(static_cast<Pool>(p))->forget(slot.array);
  }
}

void TrainStep::zero_loss() {
  zero_bytes(sums_.data(), sums_.size(), context_.stream);
}

LossSums TrainStep::read_loss() {
  if (context_.device == DeviceType::kCuda)
    copy_bytes(host_sums_, sums_.data(), sums_.size(), context_.stream);
  synchronize(context_.stream);
  device_group_.check();
  return host_sums_->loss;
}

LossSums TrainStep::evaluate(const Batch& batch, TargetResults* targets) {
  LM_CHECK(started_.empty(), "an evaluation before the step's results are read");
  context_.uploads.rewind();
  zero_loss();
  if (targets != nullptr) *targets = {};
  const auto copy_rows = [&](const View& rows, std::vector<float>& to) {
    to.resize(static_cast<size_t>(rows.elements()));
    copy_bytes(to.data(), rows.data, rows.bytes(), context_.stream);
  };
  walk_forward(batch, [&](const Operation& operation, ForwardPass& pass) {
    pass.head(operation);
    if (targets == nullptr || !pass.losses().defined()) return;
    if (context_.spec.scores()) return copy_rows(pass.losses(), targets->scores);
    copy_rows(pass.losses(), targets->nll);
    copy_rows(pass.correct(), targets->correct);
  });
  return read_loss();  // waits for the copies, too
}

void TrainStep::walk_logits(const Batch& batch, const RowPicker& pick, const View& out,
                            std::span<const KeyValueCache* const> caches) {
  LM_CHECK(started_.empty(), "logits before the step's results are read");
  View normed;
  context_.uploads.rewind();  // whoever came before has waited
  const auto head = [&](const Operation& operation, ForwardPass& pass) {
    if (unit(operation).segment())
      return head_segment_logits(context_, pass.bind_segment(operation), normed, out);
    const View rows = pick(pass.x());
    if (operation.kind == OperationKind::kHead) return head_logits(context_, pass.bind_head(), rows, out);
    normed = head_normed(context_, pass.bind_norm(), rows);
  };
  walk_forward(batch, head, caches);
}

std::vector<float> TrainStep::logits(const Batch& batch, const std::vector<int32_t>& rows) {
  const auto count = static_cast<int64_t>(rows.size()), vocab = context_.spec.vocab;
  const int64_t bytes = count * vocab * static_cast<int64_t>(dtype_size(context_.dtype));
  const Memory memory(context_.device, bytes);
  const View out = view_of(memory.data(), context_.dtype, count, vocab);
  const auto pick = [&](const View& x) {
    const View index = context_.tensor(count, 1, DType::kI32);
    context_.uploads.send(index.data, rows.data(), count * 4, context_.stream);
    const View picked = context_.tensor(count, context_.spec.hidden);
    context_.kernels.gather_rows({.table = x.data,
                                  .index = static_cast<const int32_t*>(index.data),
                                  .out = picked.data,
                                  .rows = count,
                                  .width = context_.spec.hidden,
                                  .dtype = context_.dtype},
                                 context_.stream);
    return picked;
  };
  walk_logits(batch, pick, out);
  // From bf16 by the same kernel that adds gradients.
  std::vector<float> floats(static_cast<size_t>(count * vocab));
  std::vector<std::byte> host(static_cast<size_t>(bytes));
  copy_bytes(host.data(), out.data, bytes, context_.stream);
  synchronize(context_.stream);
  device_group_.check();
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

void TrainStep::extend(std::span<const Continuation> texts, const View& logits) {
  Batch batch;
  batch.document_start = {0};
  std::vector<const KeyValueCache*> caches;
  for (const Continuation& text : texts) {
    caches.push_back(text.cache);
    batch.token.insert(batch.token.end(), text.tokens.begin(), text.tokens.end());
    for (int64_t i = 0; i < std::ssize(text.tokens); ++i)
      batch.position.push_back(static_cast<int32_t>(text.cache->tokens() + i));
    batch.document_start.push_back(static_cast<int32_t>(batch.tokens()));
  }
  batch.target.assign(batch.token.size(), -1);
  batch.sample.assign(batch.token.size(), 0);
  const int64_t first = batch.tokens() - logits.rows;
  walk_logits(
      batch, [&](const View& x) { return x.row_range(first, logits.rows); }, logits, caches);
  for (const Continuation& text : texts)
    text.cache->set_tokens(text.cache->tokens() + std::ssize(text.tokens));
}

}  // namespace lm
