// A step's routers: their choices are counted in its forward passes, and with train.router_aux_loss all of
// these come before the first backward pass.
#include <algorithm>

#include "train/step.h"

namespace lm {

// Micro-batches that pass each block together are one group, and backward begins when all of them have been
// forward. Of several groups the counts need a forward pass more: the same kernels route the same tokens to
// the same experts, and the gradient is that of the whole step, whatever its micro-batches are.
void TrainStep::begin_routers() {
  if (!routers_) return;
  routers_->begin(config_.router_aux_loss, loss_scale_, context_.stream);
  if (config_.router_aux_loss == 0 || std::ssize(batches_->micro) <= config_.group) return;
  routers_->count_forward(true);
  for (const Batch& batch : batches_->micro)
    walk_forward(
        batch, [](const Operation&, ForwardPass&) {}, {}, &*routers_);
  settle_routers();
}

// Before an operation: whether it is a forward pass that counts, and whether the counts have to be complete.
void TrainStep::watch_routers(const Operation& operation) {
  if (!routers_ || routers_->settled()) return;
  routers_->count_forward(operation.kind == OperationKind::kForward);
  if (operation.kind == OperationKind::kBackward && config_.router_aux_loss > 0) settle_routers();
}

// In the order of ranks, so that all of them have the same bits.
void TrainStep::settle_routers() {
  if (context_.device == DeviceType::kCuda) return settle_routers_on_device();
  const std::span<double> sums = routers_->sums();
  if (group_.ranks() > 1) {
    const auto mine = static_cast<int64_t>(sums.size_bytes());
    std::vector<ByteRange> shards;
    for (int r = 0; r < group_.ranks(); ++r) shards.push_back({r * mine, mine});
    std::vector<double> all(sums.size() * static_cast<size_t>(group_.ranks()));
    std::ranges::copy(sums, all.begin() + group_.rank() * std::ssize(sums));
    group_.all_gather("loads of experts", reinterpret_cast<std::byte*>(all.data()), shards);
    std::ranges::fill(sums, 0);
    for (size_t i = 0; i < all.size(); ++i) sums[i % sums.size()] += all[i];
  }
  routers_->settle();
}

// The same in stream order: sums pass from GPU to GPU.
void TrainStep::settle_routers_on_device() {
  if (const int ranks = group_.ranks(); ranks > 1) {
    std::vector<ByteRange> shards;
    for (int r = 0; r < ranks; ++r)
      shards.push_back({r * routers_->bytes_of_rank(), routers_->bytes_of_rank()});
    device_group_.begin_after(context_.stream);
    device_group_.all_gather("loads of experts", routers_->sums_of_ranks(), shards);
    device_group_.end_before(context_.stream);
  }
  routers_->settle_on_device(context_, &sums()->routers);
}

// Before the step's sums are read.
void TrainStep::end_routers() {
  if (routers_ && !routers_->settled()) settle_routers();
}

// `read`: a GPU's, in host memory.
void TrainStep::add_router_columns(const RouterFigures& read, StepResult& to) const {
  if (!routers_) return;
  const RouterFigures figures = context_.device == DeviceType::kCuda ? read : routers_->figures();
  to.columns.emplace_back("router_aux_loss", figures.balance);
  to.columns.emplace_back("expert_load_max", figures.most_load);
  to.columns.emplace_back("expert_load_min", figures.least_load);
  to.columns.emplace_back("router_entropy", figures.entropy);
}

}  // namespace lm
