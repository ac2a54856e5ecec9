// Dry run: the code of src/model runs its forward and backward with kernels that count and an arena that has
// no memory, and so tells what a step needs of the arena and what its operations cost. Layers that are alike
// (alike_layers.h), chunks of rows that are alike and micro-batches after the first few are carried out once:
// the work does not grow with the number of tokens, documents or micro-batches. Pure; some ten microseconds
// per layer.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/counting.h"
#include "model/pass.h"
#include "spec/block_layout.h"

namespace lm {

// What a pass depends on, beside the batches that it is given. Borrowed values outlive it.
struct PassShape {
  const ModelSpec& spec;
  const ModelLayout& layout;
  const AdapterSpec* adapter = nullptr;  // null: full fine-tuning
  DType dtype = DType::kBF16;
  bool fp32_adapters = false;  // what is trained is fp32 whatever dtype says
  DType gradient_dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int threads = 1;
  int64_t row_chunk = 512;  // rows of logits at once
  bool recompute = false;
  bool round_rows = false;
  int64_t documents_at_once = 0;
  int64_t group = 1;               // micro-batches that pass a block before the next
  bool inputs_off_device = false;  // block inputs live in slots, not in the arena
  bool cut_head = false;           // the head comes in vocabulary segments
  bool weighted = false;           // targets have weights in the loss
  bool table_last = false;         // a tied table's gradient is made last, in the arena
  DType trained_dtype() const { return fp32_adapters ? DType::kF32 : dtype; }
};
PassSettings pass_settings(const PassShape& shape);

// All of a shape's fields but the model: one that is added and left out here does not compile.
inline auto beside_the_model(const PassShape& shape) {
  const auto& [spec, layout, adapter, dtype, fp32_adapters, gradient_dtype, device, threads, row_chunk,
               recompute, round_rows, documents_at_once, group, inputs_off_device, cut_head, weighted,
               table_last] = shape;
  return std::tuple(adapter, dtype, fp32_adapters, gradient_dtype, device, threads, row_chunk, recompute,
                    round_rows, documents_at_once, group, inputs_off_device, cut_head, weighted, table_last);
}
// What tells shapes apart: every field, and the model by its address.
inline auto shape_key(const PassShape& shape) {
  return std::tuple_cat(std::tuple(&shape.spec, &shape.layout), beside_the_model(shape));
}
using ShapeKey = decltype(shape_key(std::declval<const PassShape&>()));

struct ArenaNeed {
  int64_t bytes = 0;   // high water of a step's groups, and of an evaluation
  int64_t saved = 0;   // activations kept from forward to backward, block inputs included
  int64_t logits = 0;  // of one chunk of rows, all that are there at once
};
// For micro-batches of at most so many tokens in so many documents. Of a large group a few micro-batches are
// rehearsed; arena_need_whole rehearses all of them, for the same result.
ArenaNeed arena_need_whole(const PassShape& shape, int64_t tokens, int64_t documents);
ArenaNeed arena_need(const PassShape& shape, int64_t tokens, int64_t documents);
// Evaluation and generation: forward only.
int64_t arena_need_forward(const PassShape& shape, int64_t tokens, int64_t documents);

// The different products of the longest micro-batch: of a step of so many (the second adds gradients that the
// first wrote), or of an evaluation, which is no step of any.
int64_t gemm_shapes(const PassShape& shape, int64_t tokens, int64_t micro_batches);

// Tokens and attention work of a step.
struct StepWork {
  double tokens = 0;
  double target_rows = 0;  // tokens with a target: only these pass the head
  double squares = 0;      // sum over documents of length²: causal attention sees half of it
};

inline constexpr int kOperationKinds = static_cast<int>(OperationKind::kGather) + 1;

// What the compute operations of a step's list cost, each by itself.
class PassCosts {
 public:
  // `micro`: of each micro-batch.
  PassCosts(const PassShape& shape, const StepWork& micro);
  // Zero of what is no pass (computes()).
  const Cost& of(const Operation& operation) const;

 private:
  // Of each unit, by kind: of a step's first micro-batch, which overwrites gradients, and of the others.
  using UnitCosts = std::vector<std::array<std::array<Cost, 2>, kOperationKinds>>;
  UnitCosts costs_;
};

}  // namespace lm
