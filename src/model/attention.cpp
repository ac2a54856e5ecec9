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

// The tokens' keys and values behind the earlier ones; from the first of them attention reads.
View keep_keys_and_values(const Context& context, const DeviceBatch& batch, int64_t layer, const View& qkv) {
  const ModelSpec& spec = context.spec;
  const View kept = batch.cache->layer(layer);
  context.kernels.copy_rows(
      {.from = qkv.row_range(0, batch.tokens).column_range(spec.q_rows(), 2 * spec.kv_rows()),
       .to = kept.row_range(batch.past(), batch.tokens)},
      context.stream);
  return kept;
}

}  // namespace

void attention_forward(const Context& context, const DeviceBatch& batch, int64_t layer, const View& qkv,
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
                        .window = spec.layer(layer).window,
                        .scale = attention_scale(spec),
                        .dtype = context.dtype};
  if (batch.cache != nullptr) {
    const View kept = keep_keys_and_values(context, batch, layer, qkv);
    args.k = kept.data;
    args.v = kept.column_range(spec.kv_rows(), spec.kv_rows()).data;
    args.kv_stride = kept.stride;
  }
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
