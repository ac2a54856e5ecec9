// The arguments of attention's kernels (kernels.h has those of the others, and the rules for all of them).
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace lm {

// Consecutive documents that a GPU's attention processes at once.
struct DocumentRun {
  int64_t first = 0, tokens = 0;   // their tokens
  int64_t count = 0, longest = 0;  // documents, and tokens of the longest
  const int32_t* start = nullptr;  // [count + 1], from `first`; device memory
  // The same for the keys if they begin earlier than the queries (Documents::past).
  const int32_t* key_start = nullptr;
};

// The boundaries of documents. The CPU reads `start`, a GPU the runs.
struct Documents {
  const int32_t* start = nullptr;  // HOST memory, [count + 1]: first token of each, ending with the tokens
  int64_t count = 0;
  const DocumentRun* runs = nullptr;  // HOST memory, [run_count]
  int64_t run_count = 0;
  // For the forward pass of one document: its number of earlier tokens. Their keys and values precede those
  // of the tokens here, which continue it.
  int64_t past = 0;
};

// Causal attention inside documents, grouped heads, never a T x T matrix. Query head h reads key head
// h / (heads / kv_heads); key position j is visible to i of the same document iff i - window < j <= i (window
// 0: no limit). Softmax in fp32 of scale * q·k, or with a soft cap c of c tanh(scale * q·k / c); q, k, v may
// be slices of one fused array (strides between tokens, in elements).
struct AttentionForward {
  const void* q = nullptr;  // [tokens, heads, head_dim], stride q_stride
  const void* k = nullptr;  // [past + tokens, kv_heads, head_dim], stride kv_stride
  const void* v = nullptr;
  void* out = nullptr;   // [tokens, heads, head_dim], contiguous
  float* lse = nullptr;  // [heads, tokens]: log of the sum of exp of what the softmax is of
  Documents documents;
  int64_t tokens = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0;
  int64_t window = 0;
  float scale = 1;
  float softcap = 0;        // c; 0: none
  bool sinks = false;       // they join lse, which has to be there
  void* scratch = nullptr;  // Kernels::attention_forward_scratch bytes
  DType dtype = DType::kF32;
};

struct AttentionBackward {
  const void* dout = nullptr;  // [tokens, heads, head_dim], contiguous
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* out = nullptr;   // of the forward
  const float* lse = nullptr;  // [heads, tokens]
  void* dq = nullptr;          // stride dq_stride
  void* dk = nullptr;          // stride dkv_stride; summed over the query heads of a group
  void* dv = nullptr;
  Documents documents;
  int64_t tokens = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0, dq_stride = 0, dkv_stride = 0;
  int64_t window = 0;
  float scale = 1;
  float softcap = 0;        // c; 0: none
  bool sinks = false;       // they have joined lse and out, which cannot be made again
  void* scratch = nullptr;  // Kernels::attention_backward_scratch bytes
  DType dtype = DType::kF32;
};

}  // namespace lm
