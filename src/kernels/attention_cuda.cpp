// Attention on GPUs by ATen's kernels over packed documents: flash attention in bf16 and fp16, the
// memory-efficient kernel in fp32, which flash has not, and on cards before 8.0, which have no flash. Both
// take document starts, so padding and masks never exist. What they allocate themselves (outputs, workspaces)
// comes from ATen's caching allocator and is freed in stream order. What neither computes goes in chunks
// (attention_chunks.h).
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>

#include "kernels/aten.h"
#include "kernels/attention_chunks.h"
#include "kernels/library.h"

namespace lm {
namespace {

// The memory-efficient kernel's mask codes: the last query sees all keys, or the first query one. (Flash
// attention does the former.)
constexpr int64_t kCausalFromTopLeft = 1, kCausalFromBottomRight = 2;

// A call's documents, as ATen takes them.
at::Tensor starts_of(const DocumentRun& documents, const int32_t* start) {
  return tensor_of(const_cast<int32_t*>(start), {documents.count + 1}, {1}, DType::kI32, DeviceType::kCuda);
}
at::Tensor starts_of(const DocumentRun& documents) {
  return starts_of(documents, documents.start);
}

// The keys of a call whose one document has a past begin with that.
DocumentRun keys_of(DocumentRun documents, int64_t past) {
  documents.tokens += past;
  documents.longest += past;
  return documents;
}

// Their rows of a slice [tokens, heads, head_dim] with this stride between tokens.
at::Tensor heads_of(const DocumentRun& documents, const void* slice, int64_t heads, int64_t head_dim,
                    int64_t stride, DType dtype) {
  const int64_t offset = documents.first * stride * static_cast<int64_t>(dtype_size(dtype));
  auto* const first = static_cast<std::byte*>(const_cast<void*>(slice)) + offset;
  return tensor_of(first, {documents.tokens, heads, head_dim}, {stride, head_dim, 1}, dtype,
                   DeviceType::kCuda);
}

// Their part of lse, which lies as [heads, tokens] of each call, one after the other.
at::Tensor lse_of(const DocumentRun& documents, const float* lse, int64_t heads) {
  return tensor_of(const_cast<float*>(lse) + heads * documents.first, {heads, documents.tokens},
                   {documents.tokens, 1}, DType::kF32, DeviceType::kCuda);
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

struct Heads {
  at::Tensor q, k, v;
};
template <class Args>
Heads inputs_of(const Args& a, const DocumentRun& d, const DocumentRun& keys) {
  return {heads_of(d, a.q, a.heads, a.head_dim, a.q_stride, a.dtype),
          heads_of(keys, a.k, a.kv_heads, a.head_dim, a.kv_stride, a.dtype),
          heads_of(keys, a.v, a.kv_heads, a.head_dim, a.kv_stride, a.dtype)};
}
template <class Args>
at::Tensor output_of(const Args& a, const DocumentRun& d, const void* out) {
  return heads_of(d, out, a.heads, a.head_dim, a.heads * a.head_dim, a.dtype);
}

bool uses_flash(DType dtype) {
  return dtype_size(dtype) == 2 && at::cuda::getCurrentDeviceProperties()->major >= kFlashCapability;
}

void forward(const AttentionForward& a, const DocumentRun& d) {
  const int64_t past = a.documents.past;
  const DocumentRun keys = keys_of(d, past);
  const Heads in = inputs_of(a, d, keys);
  const at::Tensor starts = starts_of(d), out = output_of(a, d, a.out);
  const at::Tensor key_starts = past > 0 ? starts_of(d, d.key_start) : starts;
  if (uses_flash(a.dtype)) {
    const auto result = at::_flash_attention_forward(in.q, in.k, in.v, starts, key_starts, d.longest,
                                                     keys.longest, 0.0, a.window == 0, false, a.scale,
                                                     flash_left(a.window), flash_right(a.window));
    const at::Tensor lse = lse_of(d, a.lse, a.heads);
    out.copy_(std::get<0>(result));
    lse.copy_(std::get<1>(result).reshape(lse.sizes()));
    return;
  }
  const int64_t group = a.heads / a.kv_heads;
  const auto result = at::_efficient_attention_forward(
      in.q.unsqueeze(0), widen(in.k, group).unsqueeze(0), widen(in.v, group).unsqueeze(0), std::nullopt,
      starts, key_starts, d.longest, keys.longest, 0.0,
      past > 0 ? kCausalFromBottomRight : kCausalFromTopLeft, false, a.scale, {}, efficient_window(a.window));
  out.copy_(std::get<0>(result).squeeze(0));
}

void backward(const AttentionBackward& a, const DocumentRun& d) {
  const Heads in = inputs_of(a, d, d);
  const Heads grad = {heads_of(d, a.dq, a.heads, a.head_dim, a.dq_stride, a.dtype),
                      heads_of(d, a.dk, a.kv_heads, a.head_dim, a.dkv_stride, a.dtype),
                      heads_of(d, a.dv, a.kv_heads, a.head_dim, a.dkv_stride, a.dtype)};
  const at::Tensor starts = starts_of(d), out = output_of(a, d, a.out), dout = output_of(a, d, a.dout);
  if (uses_flash(a.dtype)) {
    // Without dropout the random state is not read.
    const at::Tensor no_random = tensor_of(a.scratch, {2}, {1}, DType::kI64, DeviceType::kCuda);
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        dout, in.q, in.k, in.v, out, lse_of(d, a.lse, a.heads), starts, starts, d.longest, d.longest, 0.0,
        a.window == 0, no_random, no_random, a.scale, flash_left(a.window), flash_right(a.window));
    grad.q.copy_(dq);
    grad.k.copy_(dk);
    grad.v.copy_(dv);
    return;
  }
  // Its logsumexp is padded per document in a layout of its own, so this path runs the forward once more
  // instead of saving it: fp32 on a GPU serves comparisons, and cards before 8.0 are rare.
  const int64_t group = a.heads / a.kv_heads;
  const at::Tensor q = in.q.unsqueeze(0), k = widen(in.k, group).unsqueeze(0),
                   v = widen(in.v, group).unsqueeze(0);
  const auto again =
      at::_efficient_attention_forward(q, k, v, std::nullopt, starts, starts, d.longest, d.longest, 0.0,
                                       kCausalFromTopLeft, true, a.scale, {}, efficient_window(a.window));
  const auto [dq, dk, dv, dbias] = at::_efficient_attention_backward(
      dout.unsqueeze(0), q, k, v, std::nullopt, std::get<0>(again), starts, starts, d.longest, d.longest,
      std::get<1>(again), 0.0, std::get<2>(again), std::get<3>(again), kCausalFromTopLeft, false, a.scale,
      std::nullopt, efficient_window(a.window));
  grad.q.copy_(dq.squeeze(0));
  grad.k.copy_(narrow_sum(dk.squeeze(0), a.kv_heads));
  grad.v.copy_(narrow_sum(dv.squeeze(0), a.kv_heads));
}

// The memory-efficient kernel leaves no lse for sinks to join, and its backward pass makes out without them.
template <class Args>
bool goes_in_chunks(const Args& a) {
  return !library_attends(a.head_dim, a.softcap) || (a.sinks && !uses_flash(a.dtype));
}

// Flash attention's backward pass has no room for heads of these sizes on the current card.
bool lacks_shared_memory(int64_t head_dim) {
  if (!wants_shared_memory(head_dim)) return false;
  const cudaDeviceProp* const card = at::cuda::getCurrentDeviceProperties();
  return has_little_shared_memory(card->major, card->minor);
}

}  // namespace

void attention_forward_cuda(const AttentionForward& args, StreamView stream) {
  if (goes_in_chunks(args)) return attention_forward_chunks(args, stream);
  for (int64_t i = 0; i < args.documents.run_count; ++i) forward(args, args.documents.runs[i]);
}

void attention_backward_cuda(const AttentionBackward& args, StreamView stream) {
  // Flash's own forward pass leaves the lse that the chunks need.
  const bool too_large = uses_flash(args.dtype) && lacks_shared_memory(args.head_dim);
  if (too_large || goes_in_chunks(args)) return attention_backward_chunks(args, stream);
  for (int64_t i = 0; i < args.documents.run_count; ++i) backward(args, args.documents.runs[i]);
}

}  // namespace lm
