// The arguments of the kernels of attention sinks (kernels.h has those of the others, and the rules for all
// of them). Each query head has a logit z that joins the sum of its softmax and has no value. So what
// attention makes without it, out and lse, becomes lse' = log(e^lse + e^z) and out' = e^(lse - lse') out.
// attention_backward takes these two in place of out and lse and has the gradients of q, k and v right: its
// probabilities are e^(score - lse').
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace lm {

struct AddSinks {
  const void* sinks = nullptr;  // z, [heads]
  void* out = nullptr;          // [tokens, heads, head_dim], contiguous; in place
  float* lse = nullptr;         // [heads, tokens]; in place
  int64_t tokens = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kF32;
};

// -(sum over tokens of e^(z - lse') dout · out'), in fp64 in their order, rounded once.
struct SinksGradient {
  const void* sinks = nullptr;
  const void* out = nullptr;   // out'
  const void* dout = nullptr;  // as out
  const float* lse = nullptr;  // lse'
  float* gradient = nullptr;   // [heads], overwritten
  int64_t tokens = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kF32;
};

}  // namespace lm
