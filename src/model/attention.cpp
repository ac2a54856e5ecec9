#include "model/attention.h"

#include <cmath>

namespace lm {
namespace {

struct Slices {
  std::byte* q;
  std::byte* k;
  std::byte* v;
};

Slices slices(const ModelSpec& spec, const View& qkv) {
  auto* const base = static_cast<std::byte*>(qkv.data);
  const auto size = static_cast<int64_t>(dtype_size(qkv.dtype));
  return {base, base + spec.q_rows() * size, base + (spec.q_rows() + spec.kv_rows()) * size};
}

float attention_scale(const ModelSpec& spec) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
}

}  // namespace

void attention_forward(const Context& context, const DeviceBatch& batch, int64_t window, const View& qkv,
                       const View& out, const View& lse) {
  const ModelSpec& spec = context.spec;
  const ArenaFrame frame(context.arena);
  const Slices in = slices(spec, qkv);
  AttentionForward args{.q = in.q,
                        .k = in.k,
                        .v = in.v,
                        .out = out.data,
                        .lse = lse.floats(),
                        .documents = batch.documents(),
                        .tokens = batch.tokens,
                        .heads = spec.heads,
                        .kv_heads = spec.kv_heads,
                        .head_dim = spec.head_dim,
                        .q_stride = qkv.stride,
                        .kv_stride = qkv.stride,
                        .window = window,
                        .scale = attention_scale(spec),
                        .dtype = context.dtype};
  args.scratch = context.arena.allocate(context.kernels.attention_forward_scratch(args, context.stream));
  context.kernels.attention_forward(args, context.stream);
}

void attention_backward(const Context& context, const DeviceBatch& batch, int64_t window, const View& dout,
                        const View& qkv, const View& out, const View& lse, const View& dqkv) {
  const ModelSpec& spec = context.spec;
  const ArenaFrame frame(context.arena);
  const Slices in = slices(spec, qkv), grad = slices(spec, dqkv);
  AttentionBackward args{.dout = dout.data,
                         .q = in.q,
                         .k = in.k,
                         .v = in.v,
                         .out = out.data,
                         .lse = lse.floats(),
                         .dq = grad.q,
                         .dk = grad.k,
                         .dv = grad.v,
                         .documents = batch.documents(),
                         .tokens = batch.tokens,
                         .heads = spec.heads,
                         .kv_heads = spec.kv_heads,
                         .head_dim = spec.head_dim,
                         .q_stride = qkv.stride,
                         .kv_stride = qkv.stride,
                         .dq_stride = dqkv.stride,
                         .dkv_stride = dqkv.stride,
                         .window = window,
                         .scale = attention_scale(spec),
                         .dtype = context.dtype};
  args.scratch = context.arena.allocate(context.kernels.attention_backward_scratch(args, context.stream));
  context.kernels.attention_backward(args, context.stream);
}

}  // namespace lm
