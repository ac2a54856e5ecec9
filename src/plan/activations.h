// How much arena a step needs: the allocations of the model's code (src/model) for one group, repeated
// as plain sizes in the same order and the same frames. A test holds the two against each other, byte for
// byte.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "spec/model_spec.h"
#include "spec/parameter.h"

namespace lm {

struct ActivationShape {
  int64_t tokens = 0;     // of the longest micro-batch's tensors (Plan::micro_rows)
  int64_t documents = 1;  // in it, at most
  int64_t row_chunk = 0;  // rows of logits at once
  bool recompute = false;
  bool train_embedding = true;
  DType dtype = DType::kBF16;
  DType gradient_dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int threads = 1;
  int64_t group = 1;              // micro-batches that pass a block before the next
  bool inputs_elsewhere = false;  // block inputs live in slots, not in the arena
  bool cut_head = false;          // the head comes in vocabulary segments
};

struct ArenaNeed {
  int64_t bytes = 0;   // high water of the whole step
  int64_t saved = 0;   // activations kept from forward to backward, boundaries included
  int64_t logits = 0;  // of one chunk of rows, all that are there at once
};

// At least what kernels.h's attention_forward_scratch and attention_backward_scratch say, for the CPU: known
// to the plan, which may not include kernels.
int64_t attention_forward_bound(int64_t head_dim, int64_t threads);
int64_t attention_backward_bound(int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t threads);

// `adapter` null: full fine-tuning.
ArenaNeed arena_need(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape);

// Evaluation and generation: forward only.
int64_t arena_need_forward(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape);

}  // namespace lm
