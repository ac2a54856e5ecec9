#include "train/step.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "base/error.h"

namespace lm {

// A micro-batch's activations lie in the arena in the order forward makes them:
//   [batch] [dx] [x_in 1] [saved 1] [x_in 2] [saved 2] ... [x_in L+1]
// and backward gives them back from the end. With recomputation [saved b] exists only around backward of b.
struct TrainStep::MicroBatch {
  MicroBatch(const Context& context, const Batch& batch, int64_t blocks)
      : frame(context.arena),
        device(place_batch(context, batch)),
        x_in(static_cast<size_t>(blocks)),
        saved(static_cast<size_t>(blocks)),
        mark(static_cast<size_t>(blocks)) {}
  ArenaFrame frame;
  DeviceBatch device;
  at::Tensor dx;                  // [T, H]: gradient of the residual stream
  std::vector<at::Tensor> x_in;   // [T, H] per block
  std::vector<BlockSaved> saved;  // per transformer block
  std::vector<int64_t> mark;      // of the arena, before the block's saved activations
};

TrainStep::TrainStep(const Context& context, const ModelLayout& layout, WeightStore& weights,
                     Gradients* gradients, ShardedOptimizer* optimizer, EmbeddingGradient* embedding_gradient,
                     const StepSettings& settings)
    : context_(context),
      layout_(layout),
      weights_(weights),
      gradients_(gradients),
      optimizer_(optimizer),
      embedding_gradient_(embedding_gradient),
      settings_(settings),
      layers_(context.spec.layers),
      loans_(layout.blocks.size()),
      nll_(context.device, sizeof(double)) {}

TrainStep::~TrainStep() = default;

StepResult TrainStep::run(const StepSchedule& schedule, const StepBatches& batches, int64_t step, double lr) {
  step_ = step;
  result_ = {};
  update_begun_ = false;
  gradient_scale_ = 1;
  zero_bytes(nll_.data(), nll_.size(), context_.stream);
  if (embedding_gradient_ != nullptr) {
    embedding_gradient_->begin(context_, batches.micro);
    // A tied embedding's gradient is begun by the head; an untied one consists of the step's rows alone.
    if (!context_.spec.tied) gradients_->zero(0);
  }
  for (const Operation& operation : schedule.operations) execute(operation, batches, lr);
  return result_;
}

void TrainStep::execute(const Operation& operation, const StepBatches& batches, double lr) {
  const int64_t block = operation.block, micro = operation.micro;
  switch (operation.kind) {
    case OperationKind::kAcquire:
      loans_[static_cast<size_t>(block)].emplace(weights_.acquire(block));
      break;
    case OperationKind::kRelease:
      loans_[static_cast<size_t>(block)].reset();
      break;
    case OperationKind::kForward:
      forward(block, micro, batches);
      break;
    case OperationKind::kHead:
      head(micro, batches.target_tokens > 0
                      ? static_cast<float>(1.0 / static_cast<double>(batches.target_tokens))
                      : 0.0F);
      break;
    case OperationKind::kRecompute:
      recompute(block);
      break;
    case OperationKind::kBackward:
      backward(block, micro);
      break;
    case OperationKind::kReduce:
      reduce(block);
      break;
    case OperationKind::kCheck:
      check(batches);
      break;
    case OperationKind::kUpdate:
      update(block, lr);
      break;
  }
}

bool TrainStep::trained(int64_t block) const {
  return layout_.blocks[static_cast<size_t>(block)].flat_elements > 0;
}

BlockMemory TrainStep::borrow(int64_t block) {
  const std::optional<Loan>& loan = loans_[static_cast<size_t>(block)];
  LM_CHECK(loan.has_value(), "block " + std::to_string(block) + " is used without a loan");
  return {loan->trainable(), loan->frozen(),
          gradients_ != nullptr && trained(block) ? gradients_->block(block) : nullptr};
}

BindOptions TrainStep::bind_options(bool training) const {
  BindOptions options = settings_.bind;
  options.training = training;
  options.step = step_;
  return options;
}

Param TrainStep::bind_embedding(bool training) {
  return bind_param(layout_.blocks[0], "embed", borrow(0), bind_options(training));
}

void TrainStep::forward(int64_t block, int64_t micro, const StepBatches& batches) {
  const int64_t hidden = context_.spec.hidden;
  if (block == 0) {
    micro_ = std::make_unique<MicroBatch>(context_, batches.micro[static_cast<size_t>(micro)], layers_ + 2);
    const int64_t tokens = micro_->device.tokens();
    micro_->dx = context_.tensor({tokens, hidden});
    micro_->x_in[1] = context_.tensor({tokens, hidden});
    embedding_forward(context_, bind_embedding(true).weight, micro_->device, micro_->x_in[1]);
    return;
  }
  const auto b = static_cast<size_t>(block);
  const int64_t tokens = micro_->device.tokens();
  const TransformerBlock bound =
      bind_transformer(context_.spec, layout_.blocks[b], block - 1, borrow(block), bind_options(true));
  if (settings_.recompute) {
    micro_->x_in[b + 1] = context_.tensor({tokens, hidden});
    const ArenaFrame frame(context_.arena);
    BlockSaved dropped = allocate_block_saved(context_, bound, tokens);
    block_forward(context_, bound, micro_->device, micro_->x_in[b], dropped, micro_->x_in[b + 1]);
  } else {
    micro_->mark[b] = context_.arena.mark();
    micro_->saved[b] = allocate_block_saved(context_, bound, tokens);
    micro_->x_in[b + 1] = context_.tensor({tokens, hidden});
    block_forward(context_, bound, micro_->device, micro_->x_in[b], micro_->saved[b], micro_->x_in[b + 1]);
  }
}

void TrainStep::head(int64_t micro, float scale) {
  const auto last = static_cast<size_t>(layers_ + 1);
  const Head bound = bind_head(layout_.blocks[last], borrow(layers_ + 1),
                               context_.spec.tied ? bind_embedding(true) : Param(), bind_options(true));
  head_loss(context_, bound, micro_->device, micro_->x_in[last], micro_->dx,
            reinterpret_cast<double*>(nll_.data()),
            {.row_chunk = settings_.row_chunk, .scale = scale, .first = micro == 0});
}

void TrainStep::recompute(int64_t block) {
  const auto b = static_cast<size_t>(block);
  const TransformerBlock bound =
      bind_transformer(context_.spec, layout_.blocks[b], block - 1, borrow(block), bind_options(true));
  micro_->mark[b] = context_.arena.mark();
  micro_->saved[b] = allocate_block_saved(context_, bound, micro_->device.tokens());
  block_forward(context_, bound, micro_->device, micro_->x_in[b], micro_->saved[b], {});
}

void TrainStep::backward(int64_t block, int64_t micro) {
  if (block == 0) {
    if (embedding_gradient_ != nullptr) {
      embedding_gradient_->add(context_, static_cast<size_t>(micro), micro_->dx);
    }
    micro_.reset();
    return;
  }
  const auto b = static_cast<size_t>(block);
  const TransformerBlock bound =
      bind_transformer(context_.spec, layout_.blocks[b], block - 1, borrow(block), bind_options(true));
  const bool want_dx = block > 1 || embedding_gradient_ != nullptr;
  block_backward(context_, bound, micro_->device, micro_->x_in[b], micro_->saved[b], micro_->dx, micro == 0,
                 want_dx);
  context_.arena.rewind(micro_->mark[b]);
}

void TrainStep::reduce(int64_t block) {
  if (!trained(block)) return;
  if (block == 0) {
    const BlockMemory memory{nullptr, nullptr, gradients_->block(0)};
    embedding_gradient_->finish(context_,
                                bind_param(layout_.blocks[0], "embed", memory, bind_options(true)).gradient);
  }
  gradients_->reduce(block);
}

void TrainStep::check(const StepBatches& batches) {
  double nll = 0;
  // Pageable host memory: the copy returns when everything before it in the stream is done. The step's one
  // wait.
  copy_bytes(&nll, nll_.data(), sizeof nll, context_.stream);
  result_.loss = batches.target_tokens > 0 ? nll / static_cast<double>(batches.target_tokens) : 0.0;
  result_.grad_norm = std::sqrt(gradients_->total_square());
  result_.skipped = !std::isfinite(result_.loss) || !std::isfinite(result_.grad_norm);
  if (settings_.clip == Clip::kGlobal)
    gradient_scale_ = clip_factor(result_.grad_norm, settings_.max_grad_norm);
}

void TrainStep::update(int64_t block, double lr) {
  if (result_.skipped || !trained(block)) return;
  if (!update_begun_) {
    optimizer_->begin_update();
    update_begun_ = true;
  }
  float scale = gradient_scale_;
  if (settings_.clip != Clip::kGlobal) {
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
    scale = settings_.clip == Clip::kBlock ? clip_factor(norm, settings_.max_grad_norm) : 1.0F;
  }
  optimizer_->update(block, {.weights = weights_.trainable_home(block),
                             .gradients = gradients_->block(block),
                             .gradient_dtype = gradients_->dtype(),
                             .gradient_scale = scale,
                             .lr = lr,
                             .step = step_});
  weights_.advance(block);
}

at::Tensor TrainStep::forward_only(const DeviceBatch& batch) {
  const int64_t tokens = batch.tokens(), hidden = context_.spec.hidden;
  // Two boundaries take turns: block b reads one and writes the other.
  at::Tensor x = context_.tensor({tokens, hidden}), y = context_.tensor({tokens, hidden});
  loans_[0].emplace(weights_.acquire(0));
  embedding_forward(context_, bind_embedding(false).weight, batch, x);
  for (int64_t block = 1; block <= layers_; ++block) {
    const auto b = static_cast<size_t>(block);
    const ArenaFrame frame(context_.arena);
    loans_[b].emplace(weights_.acquire(block));
    const TransformerBlock bound =
        bind_transformer(context_.spec, layout_.blocks[b], block - 1, borrow(block), bind_options(false));
    BlockSaved dropped = allocate_block_saved(context_, bound, tokens);
    block_forward(context_, bound, batch, x, dropped, y);
    loans_[b].reset();
    std::swap(x, y);
  }
  loans_.back().emplace(weights_.acquire(layers_ + 1));
  return x;
}

double TrainStep::evaluate(const Batch& batch) {
  const ArenaFrame frame(context_.arena);
  const DeviceBatch device = place_batch(context_, batch);
  zero_bytes(nll_.data(), nll_.size(), context_.stream);
  const at::Tensor x = forward_only(device);
  const Head bound = bind_head(layout_.blocks.back(), borrow(layers_ + 1),
                               context_.spec.tied ? bind_embedding(false) : Param(), bind_options(false));
  head_loss(context_, bound, device, x, {}, reinterpret_cast<double*>(nll_.data()),
            {.row_chunk = settings_.row_chunk, .scale = 1, .first = false});
  double nll = 0;
  copy_bytes(&nll, nll_.data(), sizeof nll, context_.stream);
  loans_[0].reset();
  loans_.back().reset();
  return nll;
}

std::vector<float> TrainStep::logits(const Batch& batch, const std::vector<int32_t>& rows) {
  const ArenaFrame frame(context_.arena);
  const DeviceBatch device = place_batch(context_, batch);
  const at::Tensor x = forward_only(device);
  const auto count = static_cast<int64_t>(rows.size()), vocab = context_.spec.vocab;
  const at::Tensor index = context_.tensor({count}, DType::kI32);
  copy_bytes(index.data_ptr(), rows.data(), count * 4, context_.stream);
  const at::Tensor picked = context_.tensor({count, context_.spec.hidden});
  context_.kernels.gather_rows({.table = x.data_ptr(),
                                .index = index.data_ptr<int32_t>(),
                                .out = picked.data_ptr(),
                                .rows = count,
                                .width = context_.spec.hidden,
                                .dtype = context_.dtype},
                               context_.stream);
  const Head bound = bind_head(layout_.blocks.back(), borrow(layers_ + 1),
                               context_.spec.tied ? bind_embedding(false) : Param(), bind_options(false));
  const at::Tensor out = at::empty({count, vocab}, x.options());
  head_logits(context_, bound, picked, out);
  loans_[0].reset();
  loans_.back().reset();
  const at::Tensor host = out.to(at::kCPU, at::kFloat);
  return {host.data_ptr<float>(), host.data_ptr<float>() + host.numel()};
}

}  // namespace lm
