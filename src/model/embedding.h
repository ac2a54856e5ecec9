// The embedding: a gather of rows forward; backward, the sum of gradients per distinct token of the whole
// optimizer step, in position order, added to the block's gradient once (for a tied weight that is after the
// head's gradient), before ranks exchange it. Memory for the sums is owned here, sized for the longest step.
#pragma once

#include <vector>

#include "model/linear.h"

namespace lm {

// x [T, H] = table[token].
void embedding_forward(const Context& context, const View& table, const DeviceBatch& batch, const View& x);

class EmbeddingGradient {
 public:
  // `max_rows` distinct tokens at most: min(V, tokens per step).
  EmbeddingGradient(const ModelSpec& spec, int64_t max_rows, int64_t max_tokens, DeviceType device);

  // A backward of the step begins: numbers the distinct tokens of its micro-batches and zeroes their sums.
  void begin(const Context& context, const std::vector<Batch>& micro_batches);
  // Adds dx [T, H] of micro-batch `micro`, in position order. Micro-batches come in ascending order.
  void add(const Context& context, size_t micro, const View& dx);
  // gradient[token] += sum, once per backward. Without a tied head the caller has zeroed `gradient` before.
  void finish(const Context& context, const View& gradient);

 private:
  // Of one micro-batch: positions grouped by slot.
  struct Slots {
    std::vector<int32_t> order_and_start;  // [T], then [slots + 1]: where a slot's positions begin
    int64_t tokens = 0;
  };

  const ModelSpec& spec_;
  int64_t max_rows_;
  std::vector<int32_t> slot_of_token_;  // [V], -1 outside a step
  std::vector<int32_t> rows_;           // distinct tokens in order of appearance
  std::vector<Slots> micro_;
  Memory sums_;   // fp32 [max_rows, H]
  Memory index_;  // on a GPU: order, start and rows of the call in flight
};

}  // namespace lm
