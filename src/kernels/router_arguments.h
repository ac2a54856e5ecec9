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

// Of one layer, over tokens: who was chosen how often, and what the router thought of them. Sums in fp64: on
// the CPU in the order of tokens; on a GPU of kRouteChunks ranges of tokens, in a fixed order. Whole numbers
// of choices are exact, in whatever order.
inline constexpr int kRouteChunks = 64;
struct RouterSums {
  double* chosen = nullptr;       // [E], of each expert: += its slots
  double* probability = nullptr;  // [E]: += its probabilities
  double* entropy = nullptr;      // [1]: += -sum of p log p of each token
};
// Where a layer's sums lie in an array of those of all layers: chosen, probability, entropy.
constexpr int64_t router_sums(int64_t experts) {
  return 2 * experts + 1;
}
struct CountRoutes {
  View probability;                 // [T, E] fp32
  const int32_t* expert = nullptr;  // [T k]
  int64_t chosen = 0;               // k
  RouterSums sums;
  bool scores = false;  // they do not add up to 1: each is taken over the sum of its row's
  // The GPU's, which counts choices by them: Routing::start, without padding.
  const int32_t* start = nullptr;  // [E + 1]
  double* partial = nullptr;       // scratch [kRouteChunks, 2 E]
};

// What a step's routers have done, of all layers and ranks; all 0: they have had no tokens.
struct RouterFigures {
  double balance = 0;     // the loss, without its coefficient: k if all experts have one load
  double most_load = 0;   // of the busiest expert over the mean of its layer, in the layer with the largest
  double least_load = 0;  // likewise the least busy one's
  double entropy = 0;     // of a token's probabilities, mean over tokens and layers; over ln E: 1 is uniform
};

// The end of a step's counts, on a GPU. Sums of ranks are added in their order.
struct SettleRoutes {
  const double* sums = nullptr;  // [ranks, layers, each]
  int64_t ranks = 0, layers = 0, experts = 0, chosen = 0;
  int64_t each = 0;                  // router_sums(E)
  double entropy_unit = 1;           // what figures->entropy is divided by: ln E
  float* fraction = nullptr;         // [E]: slots over rows², rows those of all layers; 0 without rows
  RouterFigures* figures = nullptr;  // overwritten
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
