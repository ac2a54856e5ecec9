#include "optim/sharded_optimizer.h"

#include <bit>
#include <cmath>

#include "base/philox.h"

namespace lm {
namespace {

AdamW::Master master_mode(Master master, DType weight_dtype) {
  if (weight_dtype == DType::kF32) return AdamW::Master::kWeight;
  switch (master) {
    case Master::kSplit:
      return AdamW::Master::kSplit;
    case Master::kF32:
      return AdamW::Master::kF32;
    case Master::kNone:
      return AdamW::Master::kStochastic;
  }
  return AdamW::Master::kSplit;
}

int64_t master_size(AdamW::Master mode) {
  return mode == AdamW::Master::kSplit ? 2 : mode == AdamW::Master::kF32 ? 4 : 0;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const ModelLayout& layout, const OptimizerConfig& config,
                                   DType weight_dtype, int64_t seed, const Kernels& kernels,
                                   StreamView stream)
    : layout_(layout),
      config_(config),
      weight_dtype_(weight_dtype),
      mode_(master_mode(config.master, weight_dtype)),
      seed_(seed),
      kernels_(kernels),
      stream_(stream) {
  for (const BlockLayout& block : layout.blocks) {
    blocks_.push_back({Memory(stream.device, block.flat_elements * master_size(mode_)),
                       Memory(stream.device, block.flat_elements * 4),
                       Memory(stream.device, block.flat_elements * 4)});
  }
}

void ShardedOptimizer::start(int64_t block, const std::byte* weights) {
  const auto index = static_cast<size_t>(block);
  if (mode_ != AdamW::Master::kF32 || blocks_[index].master.size() == 0) return;
  kernels_.accumulate({.to = blocks_[index].master.data(),
                       .from = weights,
                       .elements = layout_.blocks[index].flat_elements,
                       .to_dtype = DType::kF32,
                       .from_dtype = weight_dtype_,
                       .overwrite = true},
                      stream_);
}

void ShardedOptimizer::update(int64_t block, const UpdateInputs& inputs) {
  const auto index = static_cast<size_t>(block);
  State& state = blocks_[index];
  const double beta1 = config_.betas[0], beta2 = config_.betas[1];
  const double c1 = 1 - std::pow(beta1, static_cast<double>(t_)),
               c2 = 1 - std::pow(beta2, static_cast<double>(t_));
  const auto weight_size = static_cast<int64_t>(dtype_size(weight_dtype_));
  const auto gradient_size = static_cast<int64_t>(dtype_size(inputs.gradient_dtype));
  for (const DecayRange& range : layout_.blocks[index].ranges) {
    AdamW args;
    args.gradient = inputs.gradients + range.first * gradient_size;
    args.weight = inputs.weights + range.first * weight_size;
    args.master =
        state.master.data() == nullptr ? nullptr : state.master.data() + range.first * master_size(mode_);
    args.m = reinterpret_cast<float*>(state.m.data()) + range.first;
    args.v = reinterpret_cast<float*>(state.v.data()) + range.first;
    args.elements = range.elements;
    args.gradient_dtype = inputs.gradient_dtype;
    args.weight_dtype = weight_dtype_;
    args.mode = mode_;
    args.gradient_scale = inputs.gradient_scale;
    args.one_minus_beta1 = static_cast<float>(1 - beta1);
    args.beta2 = static_cast<float>(beta2);
    args.one_minus_beta2 = static_cast<float>(1 - beta2);
    args.step_size = static_cast<float>(inputs.lr / c1);
    args.rsqrt_correction2 = static_cast<float>(1 / std::sqrt(c2));
    args.eps = static_cast<float>(config_.eps);
    args.decay = static_cast<float>(range.decay ? 1 - inputs.lr * config_.weight_decay : 1.0);
    args.rounding_key = philox_key(static_cast<uint64_t>(seed_), Purpose::kRounding,
                                   static_cast<uint64_t>(inputs.step), static_cast<uint32_t>(block));
    args.first_index = range.first;
    kernels_.adamw(args, stream_);
  }
}

void ShardedOptimizer::read_master(int64_t block, const TensorPlace& place, const std::byte* weights,
                                   float* out) const {
  const State& state = blocks_[static_cast<size_t>(block)];
  const auto count = static_cast<size_t>(place.parameter.elements());
  const auto bytes = static_cast<int64_t>(count) * 4;
  if (mode_ == AdamW::Master::kWeight) {
    copy_bytes(out, weights + place.offset * 4, bytes, stream_);
    return;
  }
  if (mode_ == AdamW::Master::kF32) {
    copy_bytes(out, state.master.data() + place.offset * 4, bytes, stream_);
    return;
  }
  std::vector<uint16_t> high(count), low(count, 0);
  copy_bytes(high.data(), weights + place.offset * 2, static_cast<int64_t>(count) * 2, stream_);
  if (mode_ == AdamW::Master::kSplit) {
    copy_bytes(low.data(), state.master.data() + place.offset * 2, static_cast<int64_t>(count) * 2, stream_);
  }
  for (size_t i = 0; i < count; ++i) {
    const auto top = static_cast<uint32_t>(high[i] - (low[i] >= 0x8000 ? 1 : 0)) & 0xFFFF;
    out[i] = std::bit_cast<float>(top << 16 | low[i]);
  }
}

void ShardedOptimizer::visit_state(StateVisitor& visitor) {
  visitor.number("optimizer.t", t_);
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const int64_t n = layout_.blocks[b].flat_elements;
    if (n == 0) continue;
    const std::string name = "block" + std::to_string(b) + ".";
    const auto span = [](const Memory& m) {
      return std::span<std::byte>(m.data(), static_cast<size_t>(m.size()));
    };
    if (blocks_[b].master.size() > 0) {
      visitor.tensor(name + "master", mode_ == AdamW::Master::kSplit ? DType::kI16 : DType::kF32, {n},
                     span(blocks_[b].master));
    }
    visitor.tensor(name + "m", DType::kF32, {n}, span(blocks_[b].m));
    visitor.tensor(name + "v", DType::kF32, {n}, span(blocks_[b].v));
  }
}

}  // namespace lm
