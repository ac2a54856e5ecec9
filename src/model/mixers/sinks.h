// Attention sinks: a trained logit of each query head, which joins the sum of its softmax and has no value
// (kernels/sink_arguments.h has the formulas). Attention itself does not know of them: what it has made is
// changed, and its backward pass takes that in place of its own.
#pragma once

#include <span>

#include "model/context.h"
#include "model/linear.h"

namespace lm {

struct Sinks {
  Param logits;  // [n_h]
};

// What attention has made of some tokens.
struct Attended {
  View out;              // [T, n_h d], contiguous
  float* lse = nullptr;  // [n_h, tokens]; where there are runs that of each, one after the other
  int64_t tokens = 0;    // the first of T
  int64_t head_dim = 0;
  std::span<const DocumentRun> runs = {};  // that attention has processed at once, on a GPU
};

// In place.
void add_sinks(const Context& context, const Sinks& sinks, const Attended& attended);

// `attended`: with the sinks; dout as its `out`. `first`: the gradient is overwritten. Frozen ones have none.
void add_sinks_gradient(const Context& context, const Sinks& sinks, const Attended& attended,
                        const View& dout, bool first);

}  // namespace lm
