#include "model/mixers/attention.h"

#include "model/carried.h"

namespace lm {
namespace {

// The slices of a row of qkv, or of its gradient.
View q_of(const AttentionSpec& spec, const View& qkv) {
  return qkv.column_range(0, spec.q_rows());
}
View k_of(const AttentionSpec& spec, const View& qkv) {
  return qkv.column_range(spec.q_rows(), spec.kv_rows());
}
View v_of(const AttentionSpec& spec, const View& qkv) {
  return qkv.column_range(spec.q_rows() + spec.kv_rows(), spec.kv_rows());
}
// What the projection makes of a row: all of it, or q and k; q alone where k and v are borrowed.
View projected(const AttentionSpec& spec, const View& qkv) {
  return qkv.column_range(0, spec.projected_rows());
}

// q's and k's heads are neighbours in a row, so that one call rotates both.
void rotate(const Context& context, const AttentionSpec& spec, const DeviceBatch& batch, const View& qkv,
            bool inverse) {
  if (!spec.rotates()) return;
  const RopeSpec& rope = context.spec.ropes.at(static_cast<size_t>(spec.rope));
  context.kernels.rope({.x = qkv.data,
                        .cos = context.rope.cos(spec.rope),
                        .sin = context.rope.sin(spec.rope),
                        .position = batch.position,
                        .rows = batch.tokens,
                        .heads = spec.heads + spec.own_kv_heads(),
                        .head_dim = spec.head_dim,
                        .x_stride = qkv.stride,
                        .dim = rope.dim,
                        .neighbours = rope.neighbours,
                        .inverse = inverse,
                        .dtype = context.dtype},
                       context.stream);
}

// q by its positions, or q's gradient.
void scale_queries(const Context& context, const AttentionSpec& spec, const DeviceBatch& batch,
                   const View& q) {
  if (spec.position_period == 0) return;
  context.kernels.scale_by_position({.x = q.data,
                                     .position = batch.position,
                                     .rows = batch.tokens,
                                     .width = q.columns,
                                     .stride = q.stride,
                                     .slope = static_cast<float>(spec.position_slope),
                                     .period = spec.position_period,
                                     .dtype = context.dtype},
                                    context.stream);
}

// What one of the two head norms works on: the heads of q or of k before it in `saved.qk`, after it in the
// same columns of qkv.
struct Heads {
  View x, rstd;
  Groups groups;
  int64_t first = 0;  // column of the first head
  View columns_of(const View& qkv) const { return qkv.column_range(first, x.columns); }
};

Groups groups_of(const AttentionSpec& spec, int64_t heads) {
  return spec.joint_norm ? Groups{1, heads * spec.head_dim} : Groups{heads, spec.head_dim, spec.own_norms};
}

// Of a layer's own keys.
int64_t key_groups(const AttentionSpec& spec) {
  return spec.borrows() ? 0 : groups_of(spec, spec.kv_heads).groups;
}

Heads heads_of(const AttentionSpec& spec, const Attention::Saved& saved, bool keys) {
  const int64_t heads = keys ? spec.kv_heads : spec.heads, first = keys ? spec.q_rows() : 0;
  const int64_t rows = saved.qk.rows, before = keys ? groups_of(spec, spec.heads).groups : 0;
  const Groups groups = groups_of(spec, heads);
  return {.x = saved.qk.column_range(first, heads * spec.head_dim),
          .rstd = saved.qk_rstd.row_range(before * rows, groups.groups * rows),
          .groups = groups,
          .first = first};
}

// Whether v is kept before its norm: where v is k, the head norms have kept that.
bool keeps_values(const AttentionSpec& spec) {
  return spec.value_norm && !(spec.values_are_keys && spec.head_norm);
}
View values_before_norm(const AttentionSpec& spec, const Attention::Saved& saved) {
  return keeps_values(spec) ? saved.v : k_of(spec, saved.qk);
}

// v in its place, from what the projection has made. k is without norm and RoPE yet.
void make_values(const Context& context, const Attention& a, const Attention::Saved& saved) {
  const View v = v_of(a.spec, saved.qkv), from = a.spec.values_are_keys ? k_of(a.spec, saved.qkv) : v;
  if (!a.spec.value_norm) {
    if (a.spec.values_are_keys) context.kernels.copy_rows({.from = from, .to = v}, context.stream);
    return;
  }
  if (keeps_values(a.spec)) context.kernels.copy_rows({.from = from, .to = saved.v}, context.stream);
  norm_forward(context, a.v_norm, values_before_norm(a.spec, saved), v, saved.v_rstd,
               {a.spec.kv_heads, a.spec.head_dim});
}

// From v's gradient to that of the projection, to whose rows of k it is added where v is k. k's own gradient
// is before its norm and RoPE already.
void make_values_backward(const Context& context, const Attention& a, const Attention::Saved& saved,
                          const View& dqkv, bool first) {
  const View dk = k_of(a.spec, dqkv), dv = v_of(a.spec, dqkv);
  if (a.spec.value_norm) {
    norm_backward(context, a.v_norm,
                  {.dy = dv, .x = values_before_norm(a.spec, saved), .rstd = saved.v_rstd, .dx = dv},
                  {a.spec.kv_heads, a.spec.head_dim}, first);
  }
  if (!a.spec.values_are_keys) return;
  // accumulate takes rows without gaps.
  const ArenaFrame frame(context.arena);
  const View sum = context.like(dk), part = context.like(dv);
  context.kernels.copy_rows({.from = dk, .to = sum}, context.stream);
  context.kernels.copy_rows({.from = dv, .to = part}, context.stream);
  context.kernels.accumulate({.to = sum.data,
                              .from = part.data,
                              .elements = sum.elements(),
                              .to_dtype = sum.dtype,
                              .from_dtype = part.dtype},
                             context.stream);
  context.kernels.copy_rows({.from = sum, .to = dk}, context.stream);
}

// A layer's own k and v beside each other, or their gradients.
View own_keys(const AttentionSpec& spec, const View& qkv) {
  return qkv.column_range(spec.q_rows(), 2 * spec.kv_rows());
}

// What a layer lends to later ones.
const Carried::Lent& lent_by(const DeviceBatch& batch, int64_t layer) {
  LM_CHECK(batch.carried != nullptr, "keys and values are lent by way of the micro-batch");
  return batch.carried->lent[static_cast<size_t>(layer)];
}

// For later layers.
void lend(const Context& context, const Attention& a, const DeviceBatch& batch, const View& qkv) {
  if (!a.spec.lends || batch.continues()) return;
  context.kernels.copy_rows({.from = own_keys(a.spec, qkv), .to = lent_by(batch, a.layer).rows},
                            context.stream);
}

// A borrower's dk and dv [T, 2 n_kv d] join those of the others.
void give_back(const Context& context, const AttentionSpec& spec, const DeviceBatch& batch, const View& dkv) {
  const View& sum = lent_by(batch, spec.source).gradient;
  context.kernels.accumulate({.to = sum.data,
                              .from = dkv.data,
                              .elements = dkv.elements(),
                              .to_dtype = sum.dtype,
                              .from_dtype = dkv.dtype},
                             context.stream);
}

// The lender's own dk and dv join them, and become the sum of all.
void take_back(const Context& context, const Attention& a, const DeviceBatch& batch, const View& dqkv) {
  if (!a.spec.lends) return;
  const ArenaFrame frame(context.arena);
  const View own = own_keys(a.spec, dqkv), part = context.like(own), &sum = lent_by(batch, a.layer).gradient;
  context.kernels.copy_rows({.from = own, .to = part}, context.stream);
  context.kernels.accumulate({.to = sum.data,
                              .from = part.data,
                              .elements = part.elements(),
                              .to_dtype = sum.dtype,
                              .from_dtype = part.dtype},
                             context.stream);
  context.kernels.accumulate({.to = part.data,
                              .from = sum.data,
                              .elements = part.elements(),
                              .to_dtype = part.dtype,
                              .from_dtype = sum.dtype,
                              .overwrite = true},
                             context.stream);
  context.kernels.copy_rows({.from = part, .to = own}, context.stream);
}

// What a call of attention takes: rows of q, keys and values as rows of k, then v, and where its result goes.
struct AttentionCall {
  View q, kv, out;
  float* lse = nullptr;
  Documents documents;
};

std::span<const DocumentRun> runs_of(const Documents& documents) {
  return {documents.runs, static_cast<size_t>(documents.run_count)};
}

void attend(const Context& context, const Attention& a, const AttentionCall& call) {
  const ArenaFrame frame(context.arena);
  const AttentionSpec& spec = a.spec;
  const View& kv = call.kv;
  AttentionForward args{.q = call.q.data,
                        .k = kv.data,
                        .v = kv.column_range(spec.kv_rows(), spec.kv_rows()).data,
                        .out = call.out.data,
                        .lse = call.lse,
                        .documents = call.documents,
                        .tokens = call.q.rows,
                        .heads = spec.heads,
                        .kv_heads = spec.kv_heads,
                        .head_dim = spec.head_dim,
                        .q_stride = call.q.stride,
                        .kv_stride = kv.stride,
                        .window = spec.window,
                        .scale = spec.scale(),
                        .softcap = static_cast<float>(spec.softcap),
                        .sinks = spec.sinks,
                        .dtype = context.dtype};
  args.scratch = context.arena.allocate(context.kernels.attention_forward_scratch(args, context.stream));
  context.kernels.attention_forward(args, context.stream);
  if (spec.sinks)
    add_sinks(context, a.sinks, {call.out, call.lse, args.tokens, spec.head_dim, runs_of(call.documents)});
}

// Every document continues a text of its own: its keys and values join those in the text's cache, and
// attention reads them from the text's first token on. A call for each, since the caches lie apart.
void attend_to_texts(const Context& context, const Attention& a, const DeviceBatch& batch,
                     const Attention::Saved& saved) {
  const AttentionSpec& spec = a.spec;
  for (size_t text = 0; text < batch.caches.size(); ++text) {
    const KeyValueCache& cache = *batch.caches[text];
    const int32_t first = batch.document_start[text], rows = batch.document_start[text + 1] - first;
    const View own = saved.qkv.row_range(first, rows),
               kept = cache.layer(spec.borrows() ? spec.source : a.layer);
    if (!spec.borrows())
      context.kernels.copy_rows({.from = own_keys(spec, own), .to = kept.row_range(cache.tokens(), rows)},
                                context.stream);
    const int32_t start[2] = {0, rows};
    DocumentRun run;  // with the rows of this document alone
    if (!batch.runs.empty()) run = batch.runs[text];
    run.first = 0;
    attend(context, a,
           {.q = q_of(spec, own),
            .kv = kept,
            .out = saved.attention.row_range(first, rows),
            .lse = saved.lse.floats() + first * spec.heads,
            .documents = {start, 1, &run, batch.runs.empty() ? 0 : 1, cache.tokens()}});
  }
}

// saved.attention and saved.lse of saved.qkv.
void attend(const Context& context, const Attention& a, const DeviceBatch& batch,
            const Attention::Saved& saved) {
  const AttentionSpec& spec = a.spec;
  if (batch.continues()) return attend_to_texts(context, a, batch, saved);
  attend(context, a,
         {.q = q_of(spec, saved.qkv).row_range(0, batch.tokens),
          .kv = spec.borrows() ? lent_by(batch, spec.source).rows : own_keys(spec, saved.qkv),
          .out = saved.attention,
          .lse = saved.lse.floats(),
          .documents = batch.documents()});
}

// Gradients as attention makes them: of q, and of keys and then values.
struct Gradients {
  View dq, dkv;
};

// `made` from dout [T, n_h d].
void attend_backward(const Context& context, const Attention& a, const DeviceBatch& batch,
                     const Attention::Saved& saved, const View& dout, const Gradients& made) {
  const AttentionSpec& spec = a.spec;
  const auto& [dq, dkv] = made;
  const ArenaFrame frame(context.arena);
  const View kv = spec.borrows() ? lent_by(batch, spec.source).rows : own_keys(spec, saved.qkv);
  AttentionBackward args{.dout = dout.data,
                         .q = q_of(spec, saved.qkv).data,
                         .k = kv.data,
                         .v = kv.column_range(spec.kv_rows(), spec.kv_rows()).data,
                         .out = saved.attention.data,
                         .lse = saved.lse.floats(),
                         .dq = dq.data,
                         .dk = dkv.data,
                         .dv = dkv.column_range(spec.kv_rows(), spec.kv_rows()).data,
                         .documents = batch.documents(),
                         .tokens = batch.tokens,
                         .heads = spec.heads,
                         .kv_heads = spec.kv_heads,
                         .head_dim = spec.head_dim,
                         .q_stride = saved.qkv.stride,
                         .kv_stride = kv.stride,
                         .dq_stride = dq.stride,
                         .dkv_stride = dkv.stride,
                         .window = spec.window,
                         .scale = spec.scale(),
                         .softcap = static_cast<float>(spec.softcap),
                         .sinks = spec.sinks,
                         .dtype = context.dtype};
  args.scratch = context.arena.allocate(context.kernels.attention_backward_scratch(args, context.stream));
  context.kernels.attention_backward(args, context.stream);
}

}  // namespace

Attention::Saved Attention::allocate(const Context& context, int64_t rows) const {
  Saved saved;
  saved.qkv = context.tensor(rows, spec.qkv_rows());
  if (spec.head_norm) {
    saved.qk = context.tensor(rows, spec.qk_rows());
    const int64_t groups = groups_of(spec, spec.heads).groups + key_groups(spec);
    saved.qk_rstd = context.tensor(rows * groups, 1, DType::kF32);
  }
  if (keeps_values(spec)) saved.v = context.tensor(rows, spec.kv_rows());
  if (spec.value_norm) saved.v_rstd = context.tensor(rows * spec.kv_heads, 1, DType::kF32);
  saved.attention = context.tensor(rows, spec.q_rows());
  saved.lse = context.tensor(spec.heads, rows, DType::kF32);
  saved.qkv_adapters = allocate_saved(context, qkv, rows);
  saved.out_adapters = allocate_saved(context, out, rows);
  return saved;
}

View Attention::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                        const MixerOutput& output) const {
  linear_forward(context, qkv, batch, {x, projected(spec, saved.qkv)}, saved.qkv_adapters);
  if (spec.head_norm) {
    context.kernels.copy_rows({.from = saved.qkv.column_range(0, saved.qk.columns), .to = saved.qk},
                              context.stream);
  }
  if (!spec.borrows()) make_values(context, *this, saved);
  if (spec.head_norm) {
    for (const bool keys : {false, true}) {
      if (keys && spec.borrows()) continue;
      const Heads heads = heads_of(spec, saved, keys);
      norm_forward(context, keys ? k_norm : q_norm, heads.x, heads.columns_of(saved.qkv), heads.rstd,
                   heads.groups);
    }
  }
  rotate(context, spec, batch, saved.qkv, false);
  scale_queries(context, spec, batch, q_of(spec, saved.qkv));
  // As they are: a prefix has no norm and no RoPE.
  put_virtual_rows(context, prefix.rows, batch, own_keys(spec, saved.qkv));
  lend(context, *this, batch, saved.qkv);
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
    const View dq = q_of(spec, dqkv),
               dkv = spec.borrows() ? context.tensor(batch.rows, 2 * spec.kv_rows()) : own_keys(spec, dqkv);
    attend_backward(context, *this, batch, saved, dattention, {dq, dkv});
    if (spec.sinks) {
      add_sinks_gradient(
          context, sinks,
          {saved.attention, saved.lse.floats(), batch.tokens, spec.head_dim, runs_of(batch.documents())},
          dattention, first);
    }
    zero_surplus(context, dqkv, batch.tokens);
    if (spec.borrows()) {
      zero_surplus(context, dkv, batch.tokens);
      give_back(context, spec, batch, dkv);
    }
  }
  take_back(context, *this, batch, dqkv);
  take_virtual_gradient(context, prefix.rows, batch, own_keys(spec, dqkv), first);
  scale_queries(context, spec, batch, q_of(spec, dqkv));
  rotate(context, spec, batch, dqkv, true);
  if (spec.head_norm) {
    for (const bool keys : {false, true}) {
      if (keys && spec.borrows()) continue;
      const Heads heads = heads_of(spec, saved, keys);
      const View dheads = heads.columns_of(dqkv);
      norm_backward(context, keys ? k_norm : q_norm,
                    {.dy = dheads, .x = heads.x, .rstd = heads.rstd, .dx = dheads}, heads.groups, first);
    }
  }
  if (!spec.borrows()) make_values_backward(context, *this, saved, dqkv, first);
  const View normed = input.normed();
  linear_backward(context, qkv, batch, {normed, projected(spec, dqkv), input.gradient()}, saved.qkv_adapters,
                  first);
}

}  // namespace lm
