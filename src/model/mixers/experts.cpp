#include "model/mixers/experts.h"

#include <algorithm>

#include "model/mixers/clamped_glu.h"
#include "model/mixers/expert_adapters.h"
#include "model/mixers/expert_products.h"
#include "model/mixers/expert_routing.h"
#include "model/mixers/expert_waves.h"

namespace lm {
namespace {

int32_t* numbers(const Context& context, int64_t count) {
  return reinterpret_cast<int32_t*>(context.arena.allocate(count * 4));
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
  int64_t slots = 0, count = 0;          // T k, and rows in use
  int64_t most = 0;                      // rows that there can be
  std::span<const ExpertJob> jobs = {};  // of an owner of experts: whose rows these are

  Rows(const Context& of, const DeviceBatch& tokens, const Experts& experts, const Routing& routed)
      : context(of),
        batch(tokens),
        mixer(experts),
        routing(routed),
        slots(tokens.tokens * experts.spec.chosen),
        most(routed_rows(slots, experts.spec.experts, pads_rows(of))) {
    if (multiplies_together(context)) {
      count = slots;  // whose is which only the device knows
      return;
    }
    for (int64_t e = 0; e < experts.spec.experts; ++e) count += rows_of(of, experts.spec, routed, slots, e);
  }

  // What an owner of experts has in a wave. Each row has the slot of its number.
  Rows(const Rows& own, const ExpertWaves& waves, int64_t wave, const Routing& of_owner)
      : context(own.context),
        batch(own.batch),
        mixer(own.mixer),
        routing(of_owner),
        slots(waves.rows(wave)),
        count(slots),
        most(std::max(own.most, waves.capacity())),
        jobs(waves.jobs(wave)) {}

  // Memory for as many rows as there can be, and of that what is in use.
  View tensor(int64_t columns) const { return tensor(columns, context.dtype); }
  View tensor(int64_t columns, DType type) const {
    return context.tensor(most, columns, type).row_range(0, count);
  }

  // Calls body(expert, runs of its rows), where the host knows. Of an owner of experts a run is a rank's, in
  // the order of ranks; else there is one, which may have no rows.
  template <class Body>
  void each(const Body& body) const {
    if (mixer.exchange != nullptr) return each_of_owner(body);
    int64_t first = 0;
    for (int64_t e = 0; e < mixer.spec.experts; ++e) {
      const RowRange run{first, rows_of(context, mixer.spec, routing, slots, e)};
      body(mixer.experts[static_cast<size_t>(e)], std::span(&run, 1));
      first += run.rows;
    }
  }

 private:
  template <class Body>
  void each_of_owner(const Body& body) const {
    std::vector<ExpertJob> sorted(jobs.begin(), jobs.end());
    std::ranges::stable_sort(sorted, {}, &ExpertJob::expert);
    for (auto job = sorted.begin(); job != sorted.end();) {
      const int64_t expert = job->expert;
      std::vector<RowRange> runs;
      for (; job != sorted.end() && job->expert == expert; ++job) runs.push_back({job->at, job->rows});
      body(mixer.experts[static_cast<size_t>(expert)], std::span<const RowRange>(runs));
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

// Whether all experts' rows are multiplied in a few launches. Where ranks divide the experts the host knows
// how many rows each has of whom, and multiplies these.
bool at_once(const Rows& rows) {
  return rows.mixer.exchange == nullptr && multiplies_together(rows.context);
}

GroupedProducts together(const Rows& rows, Layer layer) {
  return {rows.context, rows.mixer.experts, layer, rows.routing.start, rows.mixer.fetch, rows.mixer.layer};
}

// Every expert's rows through one of its layers.
void multiply(const Rows& rows, Layer layer, const View& x, const View& y) {
  if (at_once(rows)) return together(rows, layer).forward(x, y);
  rows.each([&](const Experts::Expert& expert, std::span<const RowRange> runs) {
    std::vector<LinearForward> passes;
    for (const RowRange& run : runs)
      if (run.rows > 0)
        passes.push_back({.x = x.row_range(run.first, run.rows), .y = y.row_range(run.first, run.rows)});
    if (!passes.empty()) expert_forward(rows.context, expert.*layer, rows.batch, passes);
  });
}

// Of runs that have rows; what is undefined stays so.
std::vector<LinearBackward> backward_passes(std::span<const RowRange> runs, const LinearBackward& all) {
  std::vector<LinearBackward> out;
  for (const RowRange& run : runs) {
    const auto of_run = [&](const View& x) { return x.defined() ? x.row_range(run.first, run.rows) : x; };
    if (run.rows > 0) out.push_back({.x = of_run(all.x), .dy = of_run(all.dy), .dx = of_run(all.dx)});
  }
  return out;
}

// dx = dy W of every expert's rows, and their adapters' part.
void multiply_input_gradient(const Rows& rows, Layer layer, const View& dy, const View& dx) {
  if (at_once(rows)) return together(rows, layer).input_gradient(dy, dx);
  rows.each([&](const Experts::Expert& expert, std::span<const RowRange> runs) {
    const std::vector<LinearBackward> passes = backward_passes(runs, {.x = {}, .dy = dy, .dx = dx});
    if (!passes.empty()) expert_input_gradient(rows.context, expert.*layer, rows.batch, passes);
  });
}

// linear_backward of every expert's rows, of which there may be none. dx may be undefined.
void multiply_backward(const Rows& rows, Layer layer, const LinearBackward& pass, bool first) {
  if (at_once(rows)) return together(rows, layer).backward(pass, first);
  const GradientSum sum = rows.mixer.exchange != nullptr ? GradientSum::kAddedWhole
                          : first                        ? GradientSum::kOverwritten
                                                         : GradientSum::kAdded;
  rows.each([&](const Experts::Expert& expert, std::span<const RowRange> runs) {
    const Linear& linear = expert.*layer;
    const std::vector<LinearBackward> passes = backward_passes(runs, pass);
    if (!passes.empty()) return expert_backward(rows.context, linear, rows.batch, passes, sum);
    if (first && linear.weight.gradient.defined())
      rows.context.kernels.zero(linear.weight.gradient, rows.context.stream);
    if (first && linear.bias.gradient.defined())
      rows.context.kernels.zero(linear.bias.gradient, rows.context.stream);
    if (first) zero_pair_gradients(rows.context, linear);
  });
}

// y += the bias of `down` of each row's expert.
void add_output_biases(const Rows& rows, const View& y) {
  if (at_once(rows)) return together(rows, &Experts::Expert::down).add_biases(y);
  rows.each([&](const Experts::Expert& expert, std::span<const RowRange> runs) {
    for (const RowRange& run : runs)
      if (run.rows > 0) add_bias(rows.context, expert.down.bias.weight, y.row_range(run.first, run.rows));
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

// From dout, dy [T, H] by rows of experts, to the gradients of `down` of all experts and of the slots'
// weights; `gate_up` becomes its own gradient.
void activation_backward(const Rows& rows, const View& gate_up, const View& dout, const View& dweight,
                         bool first) {
  const Context& context = rows.context;
  const ExpertsSpec& spec = rows.mixer.spec;
  const ArenaFrame frame(context.arena);
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

// dx = addend + what the rows of a token's experts have, in the order of its choices.
void add_input_gradient(const Rows& rows, const View& dgathered, const View& addend, const View& dx) {
  rows.context.kernels.combine_rows({.x = dgathered,
                                     .addend = addend,
                                     .out = dx,
                                     .routing = rows.routing,
                                     .tokens = rows.batch.tokens,
                                     .chosen = rows.mixer.spec.chosen},
                                    rows.context.stream);
}

// What the experts have read and its gradient, which is to be addend + theirs: undefined where nobody wants
// it.
struct ReadGradient {
  View x, addend, dx;
};
// The gradients of `gate_up` of all experts from its output's, and that of what they have read.
void input_backward(const Rows& rows, const View& dgate_up, const ReadGradient& read, bool first) {
  const ArenaFrame frame(rows.context.arena);
  const auto& [x, addend, dx] = read;
  const View gathered = gather(rows, x);
  const View dgathered = dx.defined() ? rows.tensor(x.columns) : View();
  multiply_backward(rows, &Experts::Expert::gate_up, {.x = gathered, .dy = dgate_up, .dx = dgathered}, first);
  if (dx.defined()) add_input_gradient(rows, dgathered, addend, dx);
}

// As many numbers as Saved::starts has.
int64_t starts_of_ranks(const Experts& mixer) {
  return mixer.exchange->share().ranks * (mixer.spec.experts + 1);
}

// The waves of all ranks' rows, once the experts that these have chosen are there. In a dry run the rows of
// each rank begin with another one's experts: every owner then has as many rows as a rank has.
ExpertWaves waves_of(const Rows& rows, const Experts::Saved& saved, int64_t& brought) {
  const ExpertsSpec& spec = rows.mixer.spec;
  const ExpertShare share = rows.mixer.exchange->share();
  const bool dry = rows.context.counts != nullptr;
  const std::span<const int32_t> all =
      rows.mixer.exchange->on_host({saved.starts, static_cast<size_t>(starts_of_ranks(rows.mixer))});
  std::vector<int32_t> counts;
  for (int64_t rank = 0; rank < share.ranks; ++rank) {
    for (int64_t e = 0; e < spec.experts; ++e) {
      const auto at = static_cast<size_t>(rank * (spec.experts + 1) + e);
      const int64_t other = (e + rank * share.each(spec.experts)) % spec.experts;
      counts.push_back(
          dry ? static_cast<int32_t>(rows_of(rows.context, spec, rows.routing, rows.slots, other))
              : all[at + 1] - all[at]);
    }
  }
  if (rows.mixer.fetch != nullptr)
    brought = rows.mixer.fetch->bring_for_ranks(rows.mixer.layer, counts, brought);
  return {counts, share};
}

// A wave's rows go to their owners, or come back.
void move_rows(const Rows& rows, RowsOnTheWay way, const View& from, const View& to) {
  way.from = from, way.to = to;
  rows.mixer.exchange->move_rows(rows.mixer.layer, way);
}

// The rows' outputs take the place of what the experts have read.
void forward_by_owners(const Rows& rows, const ExpertWaves& waves, const View& gathered) {
  for (int64_t wave = 0; wave < waves.count(); ++wave) {
    const ArenaFrame frame(rows.context.arena);
    const Routing none;
    const Rows here(rows, waves, wave, none);
    const View x = here.tensor(gathered.columns);
    move_rows(rows, waves.on_the_way(wave, false), gathered, x);
    if (here.count > 0) {
      const View gate_up = here.tensor(2 * rows.mixer.spec.ffn), h = here.tensor(rows.mixer.spec.ffn);
      multiply(here, &Experts::Expert::gate_up, x, gate_up);
      activate(rows.context, rows.mixer.spec, gate_up, h);
      multiply(here, &Experts::Expert::down, h, x);
    }
    move_rows(rows, waves.on_the_way(wave, true), x, gathered);
  }
}

// out[i] = from[index[i]].
void gather_numbers(const Context& context, const float* from, const int32_t* index, const View& out) {
  context.kernels.gather_rows(
      {.table = from, .index = index, .out = out.data, .rows = out.rows, .width = 1, .dtype = DType::kF32},
      context.stream);
}

// Whether rows come, and from how many ranks, only their owner knows; other ranks have pairs of these
// experts, too, and no part in their gradients.
void zero_all_pairs(const Rows& rows) {
  for (const Experts::Expert& expert : rows.mixer.experts) {
    zero_pair_gradients(rows.context, expert.gate_up);
    zero_pair_gradients(rows.context, expert.down);
  }
}

// From x and dout, by rows of experts, to the gradients of the slots' weights and of x, which take x's place.
// An expert's pair adds up what it has of the ranks' rows, in the order of ranks.
void backward_by_owners(const Rows& rows, const ExpertWaves& waves, const View& x, const View& dout,
                        const View& dweight, bool first) {
  const Context& context = rows.context;
  const ArenaFrame all(context.arena);
  const bool dry = context.counts != nullptr;
  if (first) zero_all_pairs(rows);
  const View weight = rows.tensor(1, DType::kF32), dot = rows.tensor(1, DType::kF32);
  const Routing& routing = rows.routing;
  if (pads_rows(context)) {
    for (int64_t r = 0; !dry && r < rows.count; ++r)
      weight.floats()[r] = routing.slot[r] < 0 ? 0 : routing.weight[routing.slot[r]];
  } else {
    gather_numbers(context, routing.weight, routing.slot, weight);
  }
  for (int64_t wave = 0; wave < waves.count(); ++wave) {
    const ArenaFrame frame(context.arena);
    Routing of_owner;
    const Rows here(rows, waves, wave, of_owner);
    const View x_here = here.tensor(x.columns), dout_here = here.tensor(x.columns),
               weight_here = here.tensor(1, DType::kF32), dot_here = here.tensor(1, DType::kF32);
    of_owner.weight = weight_here.floats();
    const RowsOnTheWay there = waves.on_the_way(wave, false), back = waves.on_the_way(wave, true);
    move_rows(rows, there, x, x_here);
    move_rows(rows, there, dout, dout_here);
    move_rows(rows, there, weight, weight_here);
    if (here.count > 0) {
      const View gate_up = here.tensor(2 * rows.mixer.spec.ffn);
      multiply(here, &Experts::Expert::gate_up, x_here, gate_up);
      activation_backward(here, gate_up, dout_here, dot_here, false);
      // The gradient of what came is written over what came.
      multiply_backward(here, &Experts::Expert::gate_up, {.x = x_here, .dy = gate_up, .dx = dout_here},
                        false);
    }
    move_rows(rows, back, dot_here, dot);
    move_rows(rows, back, dout_here, x);
  }
  gather_numbers(context, dot.floats(), routing.row, dweight);
}

// From the gradient of what a norm of the residual stream x has given to the experts to those of the norm and
// of x, which dx becomes; it may be undefined. `by_experts` fills the former.
template <class ByExperts>
void experts_of_stream(const Rows& rows, const View& x, const View& dx, const ByExperts& by_experts,
                       bool first) {
  const Context& context = rows.context;
  const ArenaFrame frame(context.arena);
  const Norm& norm = rows.mixer.input_norm;
  const View rstd = context.tensor(x.rows, 1, DType::kF32);
  const View read = read_by_experts(context, rows.mixer, x, rstd);
  const View dread = dx.defined() || norm.weight.gradient.defined() ? context.like(x) : View();
  by_experts({read, {}, dread});
  if (!dread.defined()) return;
  norm_backward(context, norm, {.dy = dread, .x = x, .rstd = rstd, .dx = dx.defined() ? dx : dread}, first);
}

}  // namespace

Experts::Saved Experts::allocate(const Context& context, int64_t rows) const {
  const int64_t slots = rows * spec.chosen, most = routed_rows(slots, spec.experts, pads_rows(context));
  Saved saved;
  saved.routing = {.expert = numbers(context, slots),
                   .weight = context.tensor(slots, 1, DType::kF32).floats(),
                   .row = numbers(context, slots),
                   .slot = numbers(context, most),
                   .token = numbers(context, most),
                   .start = numbers(context, spec.experts + 1)};
  saved.probability = context.tensor(rows, spec.experts, DType::kF32);
  if (exchange == nullptr)
    saved.gate_up = context.tensor(most, 2 * spec.ffn);
  else
    saved.starts = numbers(context, starts_of_ranks(*this));
  return saved;
}

View Experts::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                      const MixerOutput& output) const {
  route(context, *this, batch, x, saved);
  if (fetch != nullptr && exchange == nullptr)
    saved.brought = fetch->bring(layer, saved.routing.start, saved.brought);
  if (exchange != nullptr)
    exchange->gather_starts(layer, {saved.routing.start, static_cast<size_t>(spec.experts) + 1},
                            saved.starts);
  const Rows rows(context, batch, *this, saved.routing);
  const bool wanted = output.kind != MixerOutput::Kind::kNone;
  if (exchange != nullptr && !wanted) return {};
  const View out = output.kind == MixerOutput::Kind::kAlone ? context.like(x) : output.sum;
  const ArenaFrame frame(context.arena);
  const View gathered = gather(rows, read_by_experts(context, *this, x, {}));
  if (exchange != nullptr) {
    forward_by_owners(rows, waves_of(rows, saved, saved.brought), gathered);
  } else {
    const View gate_up = saved.gate_up.row_range(0, rows.count);
    multiply(rows, &Expert::gate_up, gathered, gate_up);
    if (!wanted) return {};
    const View h = rows.tensor(spec.ffn);
    activate(context, spec, gate_up, h);
    // What the experts have read is not needed any more, and what they write is of that size.
    multiply(rows, &Expert::down, h, gathered);
  }
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
  if (fetch != nullptr && exchange == nullptr) fetch->bring(layer, saved.routing.start, saved.brought);
  const Rows rows(context, batch, *this, saved.routing);
  const View gate_up = exchange == nullptr ? saved.gate_up.row_range(0, rows.count) : View();
  const View dweight = context.tensor(rows.slots, 1, DType::kF32);
  View x, gathered;  // `gathered` by owners: the gradient of what they have read
  if (exchange != nullptr) {
    x = input.normed();
    gathered = gather(rows, read_by_experts(context, *this, x, {}));
    const ArenaFrame frame(context.arena);
    int64_t brought = saved.brought;
    backward_by_owners(rows, waves_of(rows, saved, brought), gathered, gather(rows, dy), dweight, first);
  } else {
    const ArenaFrame frame(context.arena);
    activation_backward(rows, gate_up, gather(rows, dy), dweight, first);
  }
  const View dlogits = logit_gradient(context, *this, batch, saved, dweight, first);
  const auto by_experts = [&](const ReadGradient& read) {
    if (exchange == nullptr) return input_backward(rows, gate_up, read, first);
    if (read.dx.defined()) add_input_gradient(rows, gathered, read.addend, read.dx);
  };
  if (!x.defined()) x = input.normed();
  const View dx = input.gradient();
  if (spec.reads_stream()) experts_of_stream(rows, x, dx, by_experts, first);
  router_backward(context, *this, batch, {x, dlogits, dx}, first);
  if (!spec.reads_stream()) by_experts({x, dx, dx});
}

}  // namespace lm
