#include "model/mixers/sinks.h"

#include <utility>

namespace lm {

namespace {

// Calls body(run, its lse): kernels know of one run.
template <class Body>
void each_run(int64_t heads, const Attended& attended, const Body& body) {
  const DocumentRun all{.first = 0, .tokens = attended.tokens};
  const std::span<const DocumentRun> runs = attended.runs.empty() ? std::span(&all, 1) : attended.runs;
  for (const DocumentRun& run : runs) body(run, attended.lse + heads * run.first);
}

// Rows of a run of an array [T, n_h d].
void* rows_of(const View& x, const DocumentRun& run) {
  return x.row_range(run.first, run.tokens).data;
}

}  // namespace

void add_sinks(const Context& context, const Sinks& sinks, const Attended& attended) {
  const int64_t heads = sinks.logits.weight.rows;
  each_run(heads, attended, [&](const DocumentRun& run, float* lse) {
    context.kernels.add_sinks({.sinks = sinks.logits.weight.data,
                               .out = rows_of(attended.out, run),
                               .lse = lse,
                               .tokens = run.tokens,
                               .heads = heads,
                               .head_dim = attended.head_dim,
                               .dtype = context.dtype},
                              context.stream);
  });
}

void add_sinks_gradient(const Context& context, const Sinks& sinks, const Attended& attended,
                        const View& dout, bool first) {
  if (!sinks.logits.gradient.defined()) return;
  const ArenaFrame frame(context.arena);
  const int64_t heads = sinks.logits.weight.rows;
  const View sums = context.tensor(heads, 1, DType::kF32), of_run = context.tensor(heads, 1, DType::kF32);
  bool overwrite = true;
  each_run(heads, attended, [&](const DocumentRun& run, float* lse) {
    context.kernels.sinks_gradient({.sinks = sinks.logits.weight.data,
                                    .out = rows_of(attended.out, run),
                                    .dout = rows_of(dout, run),
                                    .lse = lse,
                                    .gradient = of_run.floats(),
                                    .tokens = run.tokens,
                                    .heads = heads,
                                    .head_dim = attended.head_dim,
                                    .dtype = context.dtype},
                                   context.stream);
    context.kernels.accumulate({.to = sums.data,
                                .from = of_run.data,
                                .elements = heads,
                                .to_dtype = sums.dtype,
                                .from_dtype = of_run.dtype,
                                .overwrite = std::exchange(overwrite, false)},
                               context.stream);
  });
  add_vector_gradient(context, sinks.logits.gradient, sums.floats(), first);
}

}  // namespace lm
