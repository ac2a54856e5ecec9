// Attention on GPUs by ATen's kernels over packed documents: flash attention in bf16, the memory-efficient
// kernel in fp32 (flash has no fp32). Both take document starts, so padding and masks never exist. What they
// allocate themselves (outputs, workspaces) comes from ATen's caching allocator and is freed in stream order.
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>

#include <cmath>

#include "model/attention.h"

namespace lm {
namespace {

constexpr int64_t kCausalFromTopLeft = 1;  // the memory-efficient kernel's mask code

struct Documents {
  at::Tensor start;  // [documents + 1] int32
  int64_t longest = 0;
};

Documents documents(const DeviceBatch& batch) {
  auto* const start = const_cast<int32_t*>(batch.document_start);
  return {view_memory(start, {batch.host->documents() + 1}, DType::kI32, DeviceType::kCuda), batch.longest};
}

// Head slices of the fused projection: [T, heads, d] views.
at::Tensor heads_of(const ModelSpec& spec, const at::Tensor& qkv, int64_t first, int64_t heads) {
  return qkv.narrow(1, first, heads * spec.head_dim).unflatten(1, {heads, spec.head_dim});
}

struct Heads {
  at::Tensor q, k, v;
};

Heads split(const ModelSpec& spec, const at::Tensor& qkv) {
  return {heads_of(spec, qkv, 0, spec.heads), heads_of(spec, qkv, spec.q_rows(), spec.kv_heads),
          heads_of(spec, qkv, spec.q_rows() + spec.kv_rows(), spec.kv_heads)};
}

double scale_of(const ModelSpec& spec) {
  return 1.0 / std::sqrt(static_cast<double>(spec.head_dim));
}

// Flash counts the keys left of the query, we count the visible ones, the query included.
std::optional<int64_t> flash_left(int64_t window) {
  return window == 0 ? std::nullopt : std::optional<int64_t>(window - 1);
}
std::optional<int64_t> flash_right(int64_t window) {
  return window == 0 ? std::nullopt : std::optional<int64_t>(0);
}
std::optional<int64_t> efficient_window(int64_t window) {
  return window == 0 ? std::nullopt : std::optional<int64_t>(window);
}

// The memory-efficient kernel wants as many key heads as query heads.
at::Tensor widen(const at::Tensor& kv, int64_t group) {
  return group == 1 ? kv : kv.repeat_interleave(group, 1);
}
at::Tensor narrow_sum(const at::Tensor& wide, int64_t kv_heads) {
  const int64_t group = wide.size(1) / kv_heads;
  return group == 1 ? wide : wide.unflatten(1, {kv_heads, group}).sum(2);
}

}  // namespace

void attention_forward_cuda(const Context& context, const DeviceBatch& batch, int64_t window,
                            const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& lse) {
  const ModelSpec& spec = context.spec;
  const Documents docs = documents(batch);
  const Heads in = split(spec, qkv);
  const at::Tensor out_heads = out.unflatten(1, {spec.heads, spec.head_dim});
  if (context.dtype == DType::kBF16) {
    const auto result = at::_flash_attention_forward(in.q, in.k, in.v, docs.start, docs.start, docs.longest,
                                                     docs.longest, 0.0, window == 0, false, scale_of(spec),
                                                     flash_left(window), flash_right(window));
    out_heads.copy_(std::get<0>(result));
    lse.copy_(std::get<1>(result).reshape(lse.sizes()));
    return;
  }
  const int64_t group = spec.heads / spec.kv_heads;
  const auto result = at::_efficient_attention_forward(
      in.q.unsqueeze(0), widen(in.k, group).unsqueeze(0), widen(in.v, group).unsqueeze(0), std::nullopt,
      docs.start, docs.start, docs.longest, docs.longest, 0.0, kCausalFromTopLeft, false, scale_of(spec), {},
      efficient_window(window));
  out_heads.copy_(std::get<0>(result).squeeze(0));
}

void attention_backward_cuda(const Context& context, const DeviceBatch& batch, int64_t window,
                             const at::Tensor& dout, const at::Tensor& qkv, const at::Tensor& out,
                             const at::Tensor& lse, const at::Tensor& dqkv) {
  const ModelSpec& spec = context.spec;
  const ArenaFrame frame(context.arena);
  const Documents docs = documents(batch);
  const Heads in = split(spec, qkv), grad = split(spec, dqkv);
  const at::Tensor out_heads = out.unflatten(1, {spec.heads, spec.head_dim});
  const at::Tensor dout_heads = dout.unflatten(1, {spec.heads, spec.head_dim});
  // Without dropout the random state is not read.
  const at::Tensor no_random = context.tensor({2}, DType::kI64);
  if (context.dtype == DType::kBF16) {
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        dout_heads, in.q, in.k, in.v, out_heads, lse, docs.start, docs.start, docs.longest, docs.longest, 0.0,
        window == 0, no_random, no_random, scale_of(spec), flash_left(window), flash_right(window));
    grad.q.copy_(dq);
    grad.k.copy_(dk);
    grad.v.copy_(dv);
    return;
  }
  // Its logsumexp is padded per document in a layout of its own, so the fp32 path runs the forward once more
  // instead of saving it: fp32 on a GPU serves comparisons, not speed.
  const int64_t group = spec.heads / spec.kv_heads;
  const at::Tensor q = in.q.unsqueeze(0), k = widen(in.k, group).unsqueeze(0),
                   v = widen(in.v, group).unsqueeze(0);
  const auto again = at::_efficient_attention_forward(q, k, v, std::nullopt, docs.start, docs.start,
                                                      docs.longest, docs.longest, 0.0, kCausalFromTopLeft,
                                                      true, scale_of(spec), {}, efficient_window(window));
  const auto [dq, dk, dv, dbias] = at::_efficient_attention_backward(
      dout_heads.unsqueeze(0), q, k, v, std::nullopt, std::get<0>(again), docs.start, docs.start,
      docs.longest, docs.longest, std::get<1>(again), 0.0, std::get<2>(again), std::get<3>(again),
      kCausalFromTopLeft, false, scale_of(spec), std::nullopt, efficient_window(window));
  grad.q.copy_(dq.squeeze(0));
  grad.k.copy_(narrow_sum(dk.squeeze(0), spec.kv_heads));
  grad.v.copy_(narrow_sum(dv.squeeze(0), spec.kv_heads));
}

}  // namespace lm
