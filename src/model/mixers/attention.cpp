#include "model/mixers/attention.h"

namespace lm {
namespace {

// q's and k's heads are neighbours in a row, so that one call rotates both.
void rotate(const Context& context, const AttentionSpec& spec, const DeviceBatch& batch, const View& qkv,
            bool inverse) {
  if (!spec.rotates()) return;
  context.kernels.rope({.x = qkv.data,
                        .cos = context.rope.cos(spec.rope),
                        .sin = context.rope.sin(spec.rope),
                        .position = batch.position,
                        .rows = batch.tokens,
                        .heads = spec.heads + spec.kv_heads,
                        .head_dim = spec.head_dim,
                        .x_stride = qkv.stride,
                        .inverse = inverse,
                        .dtype = context.dtype},
                       context.stream);
}

// The heads of q or of k in a row of qkv, and their rstd: q's [T, n_h], then k's [T, n_kv].
struct Heads {
  View x, rstd;
  Groups groups;
  int64_t first = 0;  // column of the first head
  View columns_of(const View& qkv) const { return qkv.column_range(first, x.columns); }
};

Heads heads_of(const AttentionSpec& spec, const Attention::Saved& saved, bool keys) {
  const int64_t heads = keys ? spec.kv_heads : spec.heads, first = keys ? spec.q_rows() : 0;
  const int64_t rows = saved.qk.rows;
  return {.x = saved.qk.column_range(first, heads * spec.head_dim),
          .rstd = saved.qk_rstd.row_range(keys ? spec.heads * rows : 0, heads * rows),
          .groups = {heads, spec.head_dim},
          .first = first};
}

struct Slices {
  std::byte* q;
  std::byte* k;
  std::byte* v;
};

Slices slices(const AttentionSpec& spec, const View& qkv) {
  auto* const base = static_cast<std::byte*>(qkv.data);
  const auto size = static_cast<int64_t>(dtype_size(qkv.dtype));
  return {base, base + spec.q_rows() * size, base + (spec.q_rows() + spec.kv_rows()) * size};
}

// The tokens' keys and values behind the earlier ones; from the first of them attention reads.
View keep_keys_and_values(const Context& context, const Attention& a, const DeviceBatch& batch,
                          const View& qkv) {
  const View kept = batch.cache->layer(a.layer);
  context.kernels.copy_rows(
      {.from = qkv.row_range(0, batch.tokens).column_range(a.spec.q_rows(), 2 * a.spec.kv_rows()),
       .to = kept.row_range(batch.past(), batch.tokens)},
      context.stream);
  return kept;
}

// saved.attention and saved.lse of saved.qkv.
void attend(const Context& context, const Attention& a, const DeviceBatch& batch,
            const Attention::Saved& saved) {
  const AttentionSpec& spec = a.spec;
  const ArenaFrame frame(context.arena);
  const Slices in = slices(spec, saved.qkv);
  AttentionForward args{.q = in.q,
                        .k = in.k,
                        .v = in.v,
                        .out = saved.attention.data,
                        .lse = saved.lse.floats(),
                        .documents = batch.documents(),
                        .tokens = batch.tokens,
                        .heads = spec.heads,
                        .kv_heads = spec.kv_heads,
                        .head_dim = spec.head_dim,
                        .q_stride = saved.qkv.stride,
                        .kv_stride = saved.qkv.stride,
                        .window = spec.window,
                        .scale = spec.scale(),
                        .dtype = context.dtype};
  if (batch.cache != nullptr) {
    const View kept = keep_keys_and_values(context, a, batch, saved.qkv);
    args.k = kept.data;
    args.v = kept.column_range(spec.kv_rows(), spec.kv_rows()).data;
    args.kv_stride = kept.stride;
  }
  args.scratch = context.arena.allocate(context.kernels.attention_forward_scratch(args, context.stream));
  context.kernels.attention_forward(args, context.stream);
}

// dqkv [T, Q] from dout [T, n_h d].
void attend_backward(const Context& context, const AttentionSpec& spec, const DeviceBatch& batch,
                     const Attention::Saved& saved, const View& dout, const View& dqkv) {
  const ArenaFrame frame(context.arena);
  const Slices in = slices(spec, saved.qkv), grad = slices(spec, dqkv);
  AttentionBackward args{.dout = dout.data,
                         .q = in.q,
                         .k = in.k,
                         .v = in.v,
                         .out = saved.attention.data,
                         .lse = saved.lse.floats(),
                         .dq = grad.q,
                         .dk = grad.k,
                         .dv = grad.v,
                         .documents = batch.documents(),
                         .tokens = batch.tokens,
                         .heads = spec.heads,
                         .kv_heads = spec.kv_heads,
                         .head_dim = spec.head_dim,
                         .q_stride = saved.qkv.stride,
                         .kv_stride = saved.qkv.stride,
                         .dq_stride = dqkv.stride,
                         .dkv_stride = dqkv.stride,
                         .window = spec.window,
                         .scale = spec.scale(),
                         .dtype = context.dtype};
  args.scratch = context.arena.allocate(context.kernels.attention_backward_scratch(args, context.stream));
  context.kernels.attention_backward(args, context.stream);
}

}  // namespace

Attention::Saved Attention::allocate(const Context& context, int64_t rows) const {
  Saved saved;
  saved.qkv = context.tensor(rows, spec.qkv_rows());
  if (spec.head_norm) {
    saved.qk = context.tensor(rows, spec.q_rows() + spec.kv_rows());
    saved.qk_rstd = context.tensor(rows * (spec.heads + spec.kv_heads), 1, DType::kF32);
  }
  saved.attention = context.tensor(rows, spec.q_rows());
  saved.lse = context.tensor(spec.heads, rows, DType::kF32);
  saved.qkv_adapters = allocate_saved(context, qkv, rows);
  saved.out_adapters = allocate_saved(context, out, rows);
  return saved;
}

View Attention::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                        const MixerOutput& output) const {
  linear_forward(context, qkv, batch, {x, saved.qkv}, saved.qkv_adapters);
  if (spec.head_norm) {
    context.kernels.copy_rows({.from = saved.qkv.column_range(0, saved.qk.columns), .to = saved.qk},
                              context.stream);
    for (const bool keys : {false, true}) {
      const Heads heads = heads_of(spec, saved, keys);
      norm_forward(context, keys ? k_norm : q_norm, heads.x, heads.columns_of(saved.qkv), heads.rstd,
                   heads.groups);
    }
  }
  rotate(context, spec, batch, saved.qkv, false);
  attend(context, *this, batch, saved);
  zero_surplus(context, saved.attention, batch.tokens);
  return project_output(context, out, batch, saved.attention, saved.out_adapters, output);
}

void Attention::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                         const Saved& saved, const View& dy, bool first) const {
  const View dqkv = context.tensor(batch.rows, spec.qkv_rows());
  {
    const ArenaFrame inner(context.arena);
    const View dattention = context.tensor(batch.rows, spec.q_rows());
    linear_backward(context, out, batch, {saved.attention, dy, dattention}, saved.out_adapters, first);
    attend_backward(context, spec, batch, saved, dattention, dqkv);
    zero_surplus(context, dqkv, batch.tokens);
  }
  rotate(context, spec, batch, dqkv, true);
  if (spec.head_norm) {
    for (const bool keys : {false, true}) {
      const Heads heads = heads_of(spec, saved, keys);
      const View dheads = heads.columns_of(dqkv);
      norm_backward(context, keys ? k_norm : q_norm,
                    {.dy = dheads, .x = heads.x, .rstd = heads.rstd, .dx = dheads}, heads.groups, first);
    }
  }
  const View normed = input.normed();
  linear_backward(context, qkv, batch, {normed, dqkv, input.gradient()}, saved.qkv_adapters, first);
}

}  // namespace lm
