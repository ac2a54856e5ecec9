#include "model/attention.h"

#include <cmath>

namespace lm {
namespace {

struct Slices {
  const std::byte* q;
  const std::byte* k;
  const std::byte* v;
};

Slices slices(const ModelSpec& spec, const at::Tensor& qkv) {
  const auto* base = static_cast<const std::byte*>(qkv.data_ptr());
  const auto size = static_cast<int64_t>(qkv.element_size());
  return {base, base + spec.q_rows() * size, base + (spec.q_rows() + spec.kv_rows()) * size};
}

float attention_scale(const ModelSpec& spec) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
}

}  // namespace

void attention_forward(const Context& context, const DeviceBatch& batch, int64_t window,
                       const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& lse) {
  if (context.device == DeviceType::kCuda) {
    attention_forward_cuda(context, batch, window, qkv, out, lse);
    return;
  }
  const ModelSpec& spec = context.spec;
  const ArenaFrame frame(context.arena);
  const Slices in = slices(spec, qkv);
  attention_forward_cpu({.q = in.q,
                         .k = in.k,
                         .v = in.v,
                         .out = out.data_ptr(),
                         .lse = lse.data_ptr<float>(),
                         .document_start = batch.host->document_start.data(),
                         .documents = batch.host->documents(),
                         .tokens = batch.tokens(),
                         .heads = spec.heads,
                         .kv_heads = spec.kv_heads,
                         .head_dim = spec.head_dim,
                         .q_stride = qkv.stride(0),
                         .kv_stride = qkv.stride(0),
                         .window = window,
                         .scale = attention_scale(spec),
                         .scratch = context.arena.allocate(
                             attention_forward_scratch(spec.head_dim, context.stream.threads, context.dtype)),
                         .dtype = context.dtype},
                        context.stream);
}

void attention_backward(const Context& context, const DeviceBatch& batch, int64_t window,
                        const at::Tensor& dout, const at::Tensor& qkv, const at::Tensor& out,
                        const at::Tensor& lse, const at::Tensor& dqkv) {
  if (context.device == DeviceType::kCuda) {
    attention_backward_cuda(context, batch, window, dout, qkv, out, lse, dqkv);
    return;
  }
  const ModelSpec& spec = context.spec;
  const ArenaFrame frame(context.arena);
  const Slices in = slices(spec, qkv), grad = slices(spec, dqkv);
  attention_backward_cpu(
      {.dout = dout.data_ptr(),
       .q = in.q,
       .k = in.k,
       .v = in.v,
       .out = out.data_ptr(),
       .lse = lse.data_ptr<float>(),
       .dq = const_cast<std::byte*>(grad.q),
       .dk = const_cast<std::byte*>(grad.k),
       .dv = const_cast<std::byte*>(grad.v),
       .document_start = batch.host->document_start.data(),
       .documents = batch.host->documents(),
       .tokens = batch.tokens(),
       .heads = spec.heads,
       .kv_heads = spec.kv_heads,
       .head_dim = spec.head_dim,
       .q_stride = qkv.stride(0),
       .kv_stride = qkv.stride(0),
       .dq_stride = dqkv.stride(0),
       .dkv_stride = dqkv.stride(0),
       .window = window,
       .scale = attention_scale(spec),
       .scratch = context.arena.allocate(attention_backward_scratch(
           batch.tokens(), spec.heads, spec.kv_heads, spec.head_dim, context.stream.threads, context.dtype)),
       .dtype = context.dtype},
      context.stream);
}

}  // namespace lm
