#include "model/mixers/sinks.h"

namespace lm {

void add_sinks(const Context& context, const Sinks& sinks, const Attended& attended) {
  context.kernels.add_sinks({.sinks = sinks.logits.weight.data,
                             .out = attended.out.data,
                             .lse = attended.lse,
                             .tokens = attended.tokens,
                             .heads = sinks.logits.weight.rows,
                             .head_dim = attended.head_dim,
                             .dtype = context.dtype},
                            context.stream);
}

void add_sinks_gradient(const Context& context, const Sinks& sinks, const Attended& attended,
                        const View& dout, bool first) {
  if (!sinks.logits.gradient.defined()) return;
  const ArenaFrame frame(context.arena);
  const int64_t heads = sinks.logits.weight.rows;
  const View sums = context.tensor(heads, 1, DType::kF32);
  context.kernels.sinks_gradient({.sinks = sinks.logits.weight.data,
                                  .out = attended.out.data,
                                  .dout = dout.data,
                                  .lse = attended.lse,
                                  .gradient = sums.floats(),
                                  .tokens = attended.tokens,
                                  .heads = heads,
                                  .head_dim = attended.head_dim,
                                  .dtype = context.dtype},
                                 context.stream);
  add_vector_gradient(context, sinks.logits.gradient, sums.floats(), first);
}

}  // namespace lm
