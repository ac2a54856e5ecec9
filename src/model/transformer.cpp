#include "model/transformer.h"

#include "model/attention.h"
#include "model/norm.h"

namespace lm {
namespace {

void rotate(const Context& context, int64_t layer, const DeviceBatch& batch, const View& qkv, bool inverse) {
  const ModelSpec& spec = context.spec;
  if (!spec.layer(layer).rope) return;
  // q's and k's heads are neighbours in a row, so that one call turns both.
  context.kernels.rope({.x = qkv.data,
                        .cos = context.rope.cos(),
                        .sin = context.rope.sin(),
                        .position = batch.position,
                        .rows = batch.tokens,
                        .heads = spec.heads + spec.kv_heads,
                        .head_dim = spec.head_dim,
                        .x_stride = qkv.stride,
                        .inverse = inverse,
                        .dtype = context.dtype},
                       context.stream);
}

NormKind norm_kind(const ModelSpec& spec, const TransformerBlock& block) {
  return spec.layer(block.layer).norm;
}

struct QkHeads {
  int64_t first = 0;  // column of the first head
  int64_t heads = 0;
};

QkHeads q_heads(const ModelSpec& spec) {
  return {0, spec.heads};
}
QkHeads k_heads(const ModelSpec& spec) {
  return {spec.q_rows(), spec.kv_heads};
}

void qk_norm_forward(const Context& context, const Param& norm, const BlockSaved& saved, QkHeads part) {
  const ModelSpec& spec = context.spec;
  const int64_t width = part.heads * spec.head_dim;
  const View x = saved.qk.column_range(part.first, width);
  // rstd of q's and k's heads are separate contiguous halves: [T, n_h], then [T, n_kv].
  const View rstd = saved.qk_rstd.row_range(part.first == 0 ? 0 : spec.heads * x.rows, part.heads * x.rows);
  norm_forward(context, norm, x, saved.qkv.column_range(part.first, width), rstd,
               {NormKind::kRms, part.heads, spec.head_dim});
}

void qk_norm_backward(const Context& context, const Param& norm, const BlockSaved& saved, const View& dqkv,
                      QkHeads part, bool first) {
  const ModelSpec& spec = context.spec;
  const int64_t width = part.heads * spec.head_dim;
  const View x = saved.qk.column_range(part.first, width);
  const View rstd = saved.qk_rstd.row_range(part.first == 0 ? 0 : spec.heads * x.rows, part.heads * x.rows);
  const View dy = dqkv.column_range(part.first, width);
  norm_backward(context, norm, dy, x, rstd, {}, dy, {NormKind::kRms, part.heads, spec.head_dim}, first);
}

MlpKind mlp_kind(const ModelSpec& spec, const TransformerBlock& block) {
  return spec.layer(block.layer).mlp;
}

// h [T, F] of what the first projection made.
void mlp_activation(const Context& context, MlpKind kind, const View& gate_up, const View& h) {
  switch (kind) {
    case MlpKind::kSwiGlu:
      context.kernels.swiglu_forward(
          {.gate_up = gate_up.data, .out = h.data, .rows = h.rows, .ffn = h.columns, .dtype = context.dtype},
          context.stream);
      return;
  }
}

// dh becomes h, gate_up its own gradient.
void mlp_activation_backward(const Context& context, MlpKind kind, const View& gate_up, const View& dh) {
  switch (kind) {
    case MlpKind::kSwiGlu:
      context.kernels.swiglu_backward({.gate_up = gate_up.data,
                                       .dh = dh.data,
                                       .rows = dh.rows,
                                       .ffn = dh.columns,
                                       .dtype = context.dtype},
                                      context.stream);
      return;
  }
}

void mlp_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                  BlockSaved& saved, const View& dx, bool first) {
  const ModelSpec& spec = context.spec;
  const MlpKind kind = mlp_kind(spec, block);
  const int64_t rows = batch.rows;
  const ArenaFrame frame(context.arena);
  if (!block.down.adapters.empty()) {
    // The adapter's backward wants h beside dh: it is computed once more, since the fused kernel below makes
    // h only when dh is complete.
    const View h = context.tensor(rows, spec.ffn);
    mlp_activation(context, kind, saved.gate_up, h);
    const View dh = context.tensor(rows, spec.ffn);
    linear_backward(context, block.down, batch, h, dx, dh, saved.down_adapters, first);
    mlp_activation_backward(context, kind, saved.gate_up, dh);
  } else {
    const View dh = context.tensor(rows, spec.ffn);
    linear_input_gradient(context, block.down, dx, dh);
    mlp_activation_backward(context, kind, saved.gate_up, dh);
    linear_backward(context, block.down, batch, dh, dx, {}, saved.down_adapters, first);
  }
  const View normed = context.tensor(rows, spec.hidden);
  norm_forward(context, block.mlp_norm, saved.x_mid, normed, {}, {norm_kind(spec, block), 1, spec.hidden});
  const View dnormed = context.tensor(rows, spec.hidden);
  linear_backward(context, block.gate_up, batch, normed, saved.gate_up, dnormed, saved.gate_up_adapters,
                  first);
  norm_backward(context, block.mlp_norm, dnormed, saved.x_mid, saved.rstd2, dx, dx,
                {norm_kind(spec, block), 1, spec.hidden}, first);
}

void attention_block_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                              const View& x_in, BlockSaved& saved, const View& dx, bool first, bool want_dx) {
  const ModelSpec& spec = context.spec;
  const int64_t rows = batch.rows;
  const ArenaFrame frame(context.arena);
  const View dqkv = context.tensor(rows, spec.qkv_rows());
  {
    const ArenaFrame inner(context.arena);
    const View dattention = context.tensor(rows, spec.q_rows());
    linear_backward(context, block.out, batch, saved.attention, dx, dattention, saved.out_adapters, first);
    attention_backward(context, batch, spec.layer(block.layer).window, dattention, saved.qkv, saved.attention,
                       saved.lse, dqkv);
    zero_surplus(context, dqkv, batch.tokens);
  }
  rotate(context, block.layer, batch, dqkv, true);
  if (saved.qk.defined()) {
    qk_norm_backward(context, block.q_norm, saved, dqkv, q_heads(spec), first);
    qk_norm_backward(context, block.k_norm, saved, dqkv, k_heads(spec), first);
  }
  const View normed = context.tensor(rows, spec.hidden);
  norm_forward(context, block.attention_norm, x_in, normed, {}, {norm_kind(spec, block), 1, spec.hidden});
  const bool norm_trained = block.attention_norm.gradient.defined();
  const View dnormed = want_dx || norm_trained ? context.tensor(rows, spec.hidden) : View();
  linear_backward(context, block.qkv, batch, normed, dqkv, dnormed, saved.qkv_adapters, first);
  if (dnormed.defined()) {
    norm_backward(context, block.attention_norm, dnormed, x_in, saved.rstd1, dx, dx,
                  {norm_kind(spec, block), 1, spec.hidden}, first);
  }
}

}  // namespace

BlockSaved allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows) {
  const ModelSpec& spec = context.spec;
  BlockSaved saved;
  saved.rstd1 = context.tensor(rows, 1, DType::kF32);
  saved.qkv = context.tensor(rows, spec.qkv_rows());
  if (spec.layer(block.layer).qk_norm()) {
    saved.qk = context.tensor(rows, spec.q_rows() + spec.kv_rows());
    saved.qk_rstd = context.tensor(rows * (spec.heads + spec.kv_heads), 1, DType::kF32);
  }
  saved.attention = context.tensor(rows, spec.q_rows());
  saved.lse = context.tensor(spec.heads, rows, DType::kF32);
  saved.x_mid = context.tensor(rows, spec.hidden);
  saved.rstd2 = context.tensor(rows, 1, DType::kF32);
  saved.gate_up = context.tensor(rows, 2 * spec.ffn);
  saved.qkv_adapters = allocate_saved(context, block.qkv, rows);
  saved.out_adapters = allocate_saved(context, block.out, rows);
  saved.gate_up_adapters = allocate_saved(context, block.gate_up, rows);
  saved.down_adapters = allocate_saved(context, block.down, rows);
  return saved;
}

void block_forward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                   const View& x_in, BlockSaved& saved, const View& x_out) {
  const ModelSpec& spec = context.spec;
  const int64_t rows = batch.rows;
  const ArenaFrame frame(context.arena);
  const View normed = context.tensor(rows, spec.hidden);
  norm_forward(context, block.attention_norm, x_in, normed, saved.rstd1,
               {norm_kind(spec, block), 1, spec.hidden});
  linear_forward(context, block.qkv, batch, normed, saved.qkv, saved.qkv_adapters);
  if (saved.qk.defined()) {
    context.kernels.copy_rows({.from = saved.qkv.column_range(0, saved.qk.columns), .to = saved.qk},
                              context.stream);
    qk_norm_forward(context, block.q_norm, saved, q_heads(spec));
    qk_norm_forward(context, block.k_norm, saved, k_heads(spec));
  }
  rotate(context, block.layer, batch, saved.qkv, false);
  attention_forward(context, batch, block.layer, saved.qkv, saved.attention, saved.lse);
  zero_surplus(context, saved.attention, batch.tokens);
  const View projected = context.tensor(rows, spec.hidden);
  linear_forward(context, block.out, batch, saved.attention, projected, saved.out_adapters);
  norm_forward_residual(context, norm_kind(spec, block), block.mlp_norm, projected, x_in, saved.x_mid, normed,
                        saved.rstd2);
  linear_forward(context, block.gate_up, batch, normed, saved.gate_up, saved.gate_up_adapters);
  if (!x_out.defined()) {
    if (!block.down.adapters.empty()) {
      // Only the adapter's reduced input is wanted of the last projection.
      const View h = context.tensor(rows, spec.ffn);
      mlp_activation(context, mlp_kind(spec, block), saved.gate_up, h);
      linear_reduce(context, block.down, batch, h, saved.down_adapters);
    }
    return;
  }
  const View h = context.tensor(rows, spec.ffn);
  mlp_activation(context, mlp_kind(spec, block), saved.gate_up, h);
  linear_forward(context, block.down, batch, h, x_out, saved.down_adapters, saved.x_mid);
}

void block_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                    const View& x_in, BlockSaved& saved, const View& dx, bool first, bool want_dx) {
  mlp_backward(context, block, batch, saved, dx, first);
  attention_block_backward(context, block, batch, x_in, saved, dx, first, want_dx);
}

}  // namespace lm
