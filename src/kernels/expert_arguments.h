// The arguments of the kernels of mixtures of experts (kernels.h has those of the others, and the rules for
// all of them). T tokens choose k of E experts each. Slot t k + j is the j-th choice of token t, the one with
// the largest weight first; slots sorted by expert, those of one expert in their order, are the rows that
// experts work on. There are T k of them whatever the router says, and with `pad` at most routed_rows: each
// expert's are rounded_rows (base/batch.h), since a GEMM library keeps code for every number of rows that it
// meets. Rows of no slot repeat token 0 with weight 0: they add exact zeros to every sum.
//
// Weights are summed and applied in fp32; a token's slots are added in their order. So results depend neither
// on threads nor on how the tokens of a micro-batch spread over experts.
#pragma once

#include <cstdint>

#include "base/view.h"

namespace lm {

// Where the tokens go. int32 arrays, the caller's.
struct Routing {
  int32_t* expert = nullptr;  // [T k] of each slot
  float* weight = nullptr;    // [T k] of each slot
  int32_t* row = nullptr;     // [T k] of each slot
  int32_t* slot = nullptr;    // [rows] of each row; -1: none
  int32_t* token = nullptr;   // [rows] of each row
  int32_t* start = nullptr;   // [E + 1]: rows [start[e], start[e + 1]) are expert e's
};

// How many rows there are at most: rounded_rows adds at most 31 rows, or an eighth.
constexpr int64_t routed_rows(int64_t slots, int64_t experts, bool pad) {
  return pad ? slots + slots / 8 + 31 * (experts < slots ? experts : slots) : slots;
}

// probability = softmax(logits) in fp32; a token chooses the experts of its k largest logits, of equal ones
// the one with the lowest number. The weight is the probability, or with `renormalise` the probability over
// the sum of the chosen ones in their order; `round`: rounded to the logits' type.
struct RouteTokens {
  View logits;                   // [rows, E]; rows behind the tokens are not looked at
  float* probability = nullptr;  // [T, E]
  Routing routing;
  int64_t tokens = 0, chosen = 0;
  bool renormalise = false, round = false, pad = false;
};

// The gradient of the logits from that of the slots' weights g; the choice itself has none. With the chosen
// ones' weights w before rounding: w_i (g_i - sum of w_j g_j) for the chosen i and 0 for others where they
// are renormalised, else p_i ([i chosen] g_i - sum over the chosen of p_j g_j). Rows behind the tokens become
// 0.
struct RouteBackward {
  const float* probability = nullptr;
  Routing routing;
  const float* dweight = nullptr;  // [T k] of each slot
  View dlogits;                    // [rows, E], overwritten
  int64_t tokens = 0, chosen = 0;
  bool renormalise = false;
};

// In place: x[r] *= weight of the row's slot, rounded once; 0 where it has none. With `other` dot[slot] =
// x[r] · other[r] first.
struct WeighRows {
  View x;                // [rows, width]
  View other = {};       // undefined, or of x's shape
  float* dot = nullptr;  // [T k] of each slot; null without `other`
  Routing routing;
};

// out[t] = (addend[t] +) sum over the token's slots of (weight *) x[row], in fp32, rounded once; rows behind
// the tokens become the addend, or 0.
struct CombineRows {
  View x;            // [of the experts, width]
  View addend = {};  // undefined: none; may be out
  View out;          // [rows, width]
  Routing routing;
  bool weighted = false;
  int64_t tokens = 0, chosen = 0;
};

}  // namespace lm
