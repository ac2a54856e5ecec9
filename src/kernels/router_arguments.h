// The arguments of the kernels around a mixture's experts (expert_arguments.h has those of the experts'
// rows): the factor of a shared expert, and what balances the load of a router. kernels.h has the rules for
// all of them.
#pragma once

#include <cstdint>

#include "base/view.h"
#include "kernels/expert_arguments.h"

namespace lm {

// In place: x[r] *= sigmoid(gate[r]), rounded once. With `other` dgate[r] = (x[r] · other[r]) s (1 - s)
// first, s the sigmoid: the gradient of `gate` where x is that of s * other.
struct GateRows {
  View gate;        // [rows, 1]
  View x;           // [rows, width]
  View other = {};  // undefined, or of x's shape
  View dgate = {};  // [rows, 1]; undefined without `other`
};

// Of one layer, over tokens: who was chosen how often, and what the router thought of them. Sums in the order
// of tokens, in fp64; whole numbers of choices are exact, in whatever order.
struct RouterSums {
  double* chosen = nullptr;       // [E], of each expert: += its slots
  double* probability = nullptr;  // [E]: += its probabilities
  double* entropy = nullptr;      // [1]: += -sum of p log p of each token
};
struct CountRoutes {
  View probability;                 // [T, E] fp32
  const int32_t* expert = nullptr;  // [T k]
  int64_t chosen = 0;               // k
  RouterSums sums;
  bool scores = false;  // they do not add up to 1: each is taken over the sum of its row's
};

// dlogits[t] += factor * p ⊙ (f - f · p): the gradient of factor * f · (the sum over tokens of p), f
// constant.
struct BalanceRoutes {
  const float* probability = nullptr;  // p [T, E]
  const float* fraction = nullptr;     // f [E]
  View dlogits;                        // [rows, E]; rows behind the tokens stay
  int64_t tokens = 0;
  float factor = 0;
};

}  // namespace lm
