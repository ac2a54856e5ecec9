#include "model/mixers/experts.h"

#include <algorithm>

#include "model/mixers/clamped_glu.h"
#include "model/mixers/expert_adapters.h"
#include "model/mixers/expert_products.h"
#include "model/routers.h"

namespace lm {
namespace {

int32_t* numbers(const Context& context, int64_t count) {
  return reinterpret_cast<int32_t*>(context.arena.allocate(count * 4));
}

// Rows are padded for a library, which multiplies those of one expert at a time.
bool pads(const Context& context) {
  return context.round_rows && !multiplies_together(context);
}

// How many rows expert `e` has, of those of T k slots. In a dry run nothing is routed: the busiest expert has
// twice as many as the average, the others evenly less, down to none. So the work is that of all slots, in
// products of as many sizes as a trained router makes.
int64_t rows_of(const Context& context, const ExpertsSpec& spec, const Routing& routing, int64_t slots,
                int64_t e) {
  if (context.counts == nullptr) return routing.start[e + 1] - routing.start[e];
  const auto until = [&](int64_t expert) { return slots * expert * expert / (spec.experts * spec.experts); };
  const int64_t rows = until(e + 1) - until(e);
  return rows > 0 ? context.rounded(rows) : 0;
}

// What a pass through the layer works on.
struct Rows {
  const Context& context;
  const DeviceBatch& batch;
  const Experts& mixer;
  const Routing& routing;
  int64_t slots = 0, count = 0;  // T k, and rows in use

  Rows(const Context& of, const DeviceBatch& tokens, const Experts& experts, const Routing& routed)
      : context(of),
        batch(tokens),
        mixer(experts),
        routing(routed),
        slots(tokens.tokens * experts.spec.chosen) {
    if (multiplies_together(context)) {
      count = slots;  // whose is which only the device knows
      return;
    }
    each([this](const Experts::Expert&, int64_t, int64_t rows) { count += rows; });
  }

  // Memory for as many rows as there can be, and of that what is in use.
  View tensor(int64_t columns) const {
    return context.tensor(routed_rows(slots, mixer.spec.experts, pads(context)), columns).row_range(0, count);
  }

  // Calls body(expert, its first row, how many), where the host knows.
  template <class Body>
  void each(const Body& body) const {
    int64_t first = 0;
    for (int64_t e = 0; e < mixer.spec.experts; ++e) {
      const int64_t rows = rows_of(context, mixer.spec, routing, slots, e);
      body(mixer.experts[static_cast<size_t>(e)], first, rows);
      first += rows;
    }
  }
};

// x [T, H] by rows of experts.
View gather(const Rows& rows, const View& x) {
  const Context& context = rows.context;
  const View out = rows.tensor(x.columns);
  context.kernels.gather_rows({.table = x.data,
                               .index = rows.routing.token,
                               .out = out.data,
                               .rows = rows.count,
                               .width = x.columns,
                               .dtype = context.dtype},
                              context.stream);
  return out;
}

using Layer = Linear Experts::Expert::*;

GroupedProducts together(const Rows& rows, Layer layer) {
  return {rows.context, rows.mixer.experts, layer, rows.routing.start, rows.mixer.fetch, rows.mixer.layer};
}

// Every expert's rows through one of its layers.
void multiply(const Rows& rows, Layer layer, const View& x, const View& y) {
  if (multiplies_together(rows.context)) return together(rows, layer).forward(x, y);
  rows.each([&](const Experts::Expert& expert, int64_t row, int64_t count) {
    if (count > 0)
      expert_forward(rows.context, expert.*layer, rows.batch,
                     {.x = x.row_range(row, count), .y = y.row_range(row, count)});
  });
}

// dx = dy W of every expert's rows, and their adapters' part.
void multiply_input_gradient(const Rows& rows, Layer layer, const View& dy, const View& dx) {
  if (multiplies_together(rows.context)) return together(rows, layer).input_gradient(dy, dx);
  rows.each([&](const Experts::Expert& expert, int64_t row, int64_t count) {
    if (count > 0)
      expert_input_gradient(rows.context, expert.*layer, rows.batch, dy.row_range(row, count),
                            dx.row_range(row, count));
  });
}

// linear_backward of every expert's rows, of which there may be none. dx may be undefined.
void multiply_backward(const Rows& rows, Layer layer, const LinearBackward& pass, bool first) {
  const auto& [x, dy, dx] = pass;
  if (multiplies_together(rows.context)) return together(rows, layer).backward(pass, first);
  rows.each([&, &x = x, &dy = dy, &dx = dx](const Experts::Expert& expert, int64_t row, int64_t count) {
    const Linear& linear = expert.*layer;
    if (count > 0) {
      LinearBackward part{.x = x.row_range(row, count), .dy = dy.row_range(row, count)};
      if (dx.defined()) part.dx = dx.row_range(row, count);
      return expert_backward(rows.context, linear, rows.batch, part, first);
    }
    if (first && linear.weight.gradient.defined())
      rows.context.kernels.zero(linear.weight.gradient, rows.context.stream);
    if (first && linear.bias.gradient.defined())
      rows.context.kernels.zero(linear.bias.gradient, rows.context.stream);
    if (first) zero_pair_gradients(rows.context, linear);
  });
}

RouteScores scores_of(const Experts& mixer) {
  const ExpertsSpec& spec = mixer.spec;
  if (!spec.corrected()) return {};
  return {.sigmoid = true,
          .correction = mixer.correction.values.floats(),
          .groups = spec.groups,
          .kept_groups = spec.kept_groups,
          .scale = static_cast<float>(spec.weight_scale)};
}

// What the router says of x, in the arena. Of two experts that are near each other a rounding of the logits
// chooses: where the reference has none there is none here, for a second copy of the router and of x.
View router_logits(const Context& context, const Experts& mixer, const DeviceBatch& batch, const View& x) {
  const bool wide = mixer.spec.wide_logits && context.dtype != DType::kF32;
  const View logits = context.tensor(x.rows, mixer.spec.experts, wide ? DType::kF32 : context.dtype);
  if (!wide) {
    LinearSaved none;
    linear_forward(context, mixer.router, batch, {.x = x, .y = logits}, none);
    return logits;
  }
  const ArenaFrame frame(context.arena);
  const auto widened = [&](const View& from) {
    const View to = context.tensor(from.rows, from.columns, DType::kF32);
    context.kernels.copy_rows({.from = from, .to = to}, context.stream);
    return to;
  };
  const View wide_x = widened(x), weight = widened(mixer.router.weight.weight);
  context.kernels.gemm({.a = wide_x, .b = weight, .out = logits, .transpose_b = true}, context.stream);
  return logits;
}

void route(const Context& context, const Experts& mixer, const DeviceBatch& batch, const View& x,
           const Experts::Saved& saved) {
  const ArenaFrame frame(context.arena);
  const View logits = router_logits(context, mixer, batch, x);
  context.kernels.route_tokens({.logits = logits,
                                .probability = saved.probability.floats(),
                                .routing = saved.routing,
                                .tokens = batch.tokens,
                                .chosen = mixer.spec.chosen,
                                .renormalise = mixer.spec.renormalise,
                                .round = mixer.spec.round_weights,
                                .pad = pads(context),
                                .scores = scores_of(mixer)},
                               context.stream);
  if (batch.routers != nullptr)
    batch.routers->forward(context, {mixer.layer, batch.tokens, saved.probability, saved.routing});
}

// y += the bias of `down` of each row's expert.
void add_output_biases(const Rows& rows, const View& y) {
  const Context& context = rows.context;
  if (multiplies_together(context)) return together(rows, &Experts::Expert::down).add_biases(y);
  rows.each([&](const Experts::Expert& expert, int64_t row, int64_t count) {
    if (count == 0) return;
    context.kernels.add_bias({.x = y.row_range(row, count).data,
                              .bias = expert.down.bias.weight.data,
                              .rows = count,
                              .width = y.columns,
                              .stride = y.stride,
                              .dtype = context.dtype},
                             context.stream);
  });
}

// Of experts with biases: += <dout, bias>, what the slots' weights have through that of `down`; and dout
// times the weights, of which the gradients of `down` are.
void weigh_output_gradient(const Rows& rows, const View& dout, const View& dweight) {
  const Context& context = rows.context;
  const ArenaFrame frame(context.arena);
  const View biases = rows.tensor(dout.columns), dot = context.tensor(rows.slots, 1, DType::kF32);
  context.kernels.zero(biases, context.stream);
  add_output_biases(rows, biases);
  context.kernels.weigh_rows({.x = dout, .other = biases, .dot = dot.floats(), .routing = rows.routing},
                             context.stream);
  accumulate(context, dweight, dot);
}

// From dy [T, H] to the gradients of `down` of all experts and of the slots' weights; `gate_up` becomes its
// own gradient.
void activation_backward(const Rows& rows, const View& gate_up, const View& dy, const View& dweight,
                         bool first) {
  const Context& context = rows.context;
  const ExpertsSpec& spec = rows.mixer.spec;
  const ArenaFrame frame(context.arena);
  const View dout = gather(rows, dy);
  const View dh = rows.tensor(rows.mixer.spec.ffn);
  multiply_input_gradient(rows, &Experts::Expert::down, dout, dh);
  const View h = rows.tensor(rows.mixer.spec.ffn);
  activate(context, spec, gate_up, h);
  context.kernels.weigh_rows({.x = dh, .other = h, .dot = dweight.floats(), .routing = rows.routing},
                             context.stream);
  if (spec.bias) weigh_output_gradient(rows, dout, dweight);
  activate_backward(context, spec, gate_up, dh);  // h is in dh's place now
  // train.only may choose some experts alone.
  if (std::ranges::none_of(rows.mixer.experts, [](const Experts::Expert& expert) {
        if (expert.down.bias.gradient.defined()) return true;
        return expert.down.weight.gradient.defined() || expert.down.adapted();
      }))
    return;
  if (!spec.bias) context.kernels.weigh_rows({.x = dh, .routing = rows.routing}, context.stream);
  multiply_backward(rows, &Experts::Expert::down, {.x = dh, .dy = dout}, first);
}

// The gradients of `gate_up` of all experts from its output's, and dx += that of x. dx may be undefined.
void input_backward(const Rows& rows, const View& dgate_up, const View& x, const View& dx, bool first) {
  const Context& context = rows.context;
  const ArenaFrame frame(context.arena);
  const View gathered = gather(rows, x);
  const View dgathered = dx.defined() ? rows.tensor(x.columns) : View();
  multiply_backward(rows, &Experts::Expert::gate_up, {.x = gathered, .dy = dgate_up, .dx = dgathered}, first);
  if (!dx.defined()) return;
  context.kernels.combine_rows({.x = dgathered,
                                .addend = dx,
                                .out = dx,
                                .routing = rows.routing,
                                .tokens = rows.batch.tokens,
                                .chosen = rows.mixer.spec.chosen},
                               context.stream);
}

}  // namespace

Experts::Saved Experts::allocate(const Context& context, int64_t rows) const {
  const int64_t slots = rows * spec.chosen, most = routed_rows(slots, spec.experts, pads(context));
  Saved saved;
  saved.routing = {.expert = numbers(context, slots),
                   .weight = context.tensor(slots, 1, DType::kF32).floats(),
                   .row = numbers(context, slots),
                   .slot = numbers(context, most),
                   .token = numbers(context, most),
                   .start = numbers(context, spec.experts + 1)};
  saved.probability = context.tensor(rows, spec.experts, DType::kF32);
  saved.gate_up = context.tensor(most, 2 * spec.ffn);
  return saved;
}

View Experts::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                      const MixerOutput& output) const {
  route(context, *this, batch, x, saved);
  if (fetch != nullptr) saved.brought = fetch->bring(layer, saved.routing.start, saved.brought);
  const Rows rows(context, batch, *this, saved.routing);
  const View out = output.kind == MixerOutput::Kind::kAlone ? context.like(x) : output.sum;
  const ArenaFrame frame(context.arena);
  const View gate_up = saved.gate_up.row_range(0, rows.count);
  const View gathered = gather(rows, x);
  multiply(rows, &Expert::gate_up, gathered, gate_up);
  if (output.kind == MixerOutput::Kind::kNone) return {};
  const View h = rows.tensor(spec.ffn);
  activate(context, spec, gate_up, h);
  // What the experts have read is not needed any more, and what they write is of that size.
  multiply(rows, &Expert::down, h, gathered);
  context.kernels.combine_rows({.x = gathered,
                                .addend = output.kind == MixerOutput::Kind::kAdded ? output.residual : View(),
                                .out = out,
                                .routing = saved.routing,
                                .weighted = true,
                                .tokens = batch.tokens,
                                .chosen = spec.chosen},
                               context.stream);
  return out;
}

void Experts::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                       const Saved& saved, const View& dy, bool first) const {
  if (fetch != nullptr) fetch->bring(layer, saved.routing.start, saved.brought);
  const Rows rows(context, batch, *this, saved.routing);
  const View gate_up = saved.gate_up.row_range(0, rows.count);
  const View dweight = context.tensor(rows.slots, 1, DType::kF32);
  activation_backward(rows, gate_up, dy, dweight, first);
  const View dlogits = context.tensor(dy.rows, spec.experts);
  context.kernels.route_backward({.probability = saved.probability.floats(),
                                  .routing = saved.routing,
                                  .dweight = dweight.floats(),
                                  .dlogits = dlogits,
                                  .tokens = batch.tokens,
                                  .chosen = spec.chosen,
                                  .renormalise = spec.renormalise,
                                  .scores = scores_of(*this)},
                                 context.stream);
  if (batch.routers != nullptr)
    batch.routers->backward(context, {layer, batch.tokens, saved.probability, saved.routing}, dlogits);
  const View normed = input.normed(), dx = input.gradient();
  linear_backward(context, router, batch, {.x = normed, .dy = dlogits, .dx = dx}, {}, first);
  input_backward(rows, gate_up, normed, dx, first);
}

}  // namespace lm
