// Dry run: the code of src/model runs its forward and backward with kernels that count and an arena that has
// no memory, and so tells what a step needs of the arena and what its operations cost. Layers that are alike
// (alike_layers.h), chunks of rows that are alike and micro-batches after the first few are carried out once:
// the work does not grow with the number of tokens, documents or micro-batches. Pure; some ten microseconds
// per layer.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/counting.h"
#include "model/pass.h"
#include "spec/block_layout.h"

namespace lm {

// The part of a step's configuration that its dry run depends on: one rank's passes with one backward. Steps
// for which it is equal need the same arena.
StepConfig dry_run_step(const StepConfig& step);

struct ArenaNeed {
  int64_t bytes = 0;   // high water of a step's groups, and of an evaluation
  int64_t saved = 0;   // activations kept from forward to backward, block inputs included
  int64_t logits = 0;  // of one chunk of rows, all that are there at once
};
// For micro-batches of at most so many tokens in so many documents. Of a large group a few micro-batches are
// dry-run; arena_need_whole dry-runs all of them, for the same result.
ArenaNeed arena_need_whole(const ModelParts& model, const StepConfig& step, int64_t tokens,
                           int64_t documents);
ArenaNeed arena_need(const ModelParts& model, const StepConfig& step, int64_t tokens, int64_t documents);
// Bytes of a micro-batch's activations of each block where they live off the device: its input, and behind it
// what its level of recomputation keeps. The first entry, the embedding's, is 0.
std::vector<int64_t> offloaded_activations(const ModelParts& model, const StepConfig& step, int64_t tokens,
                                           int64_t documents);
// Evaluation and generation: forward only.
int64_t arena_need_forward(const ModelParts& model, const StepConfig& step, int64_t tokens,
                           int64_t documents);

// The different products of the longest micro-batch: of a step of so many (the second adds gradients that the
// first wrote), or of an evaluation, which is no step of any.
int64_t gemm_shapes(const ModelParts& model, const StepConfig& step, int64_t tokens, int64_t micro_batches);

// Tokens and attention work of a step.
struct StepWork {
  double tokens = 0;
  double target_rows = 0;  // tokens with a target: only these pass the head
  double squares = 0;      // sum over documents of length²: causal attention sees half of it
};

inline constexpr int kOperationKinds = static_cast<int>(OperationKind::kGather) + 1;

// What the compute operations of a step's list cost, each by itself: of each unit, by kind, of a step's first
// micro-batch, which overwrites gradients, and of the others. Zero of what is no pass (computes()).
using PassCosts = std::vector<std::array<std::array<Cost, 2>, kOperationKinds>>;
// `micro`: of each micro-batch. `attention_rate`: of flash attention on a GPU (counting.h); empty: not known.
PassCosts pass_costs(const ModelParts& model, const StepConfig& step, const StepWork& micro,
                     const std::function<double(const FlashCall&)>& attention_rate = {});

}  // namespace lm
