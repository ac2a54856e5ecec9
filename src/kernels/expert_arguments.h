// The arguments of the kernels of mixtures of experts (kernels.h has those of the others, and the rules for
// all of them). T tokens choose k of E experts each. Slot t k + j is the j-th choice of token t, the best one
// first; slots sorted by expert, those of one expert in their order, are the rows that
// experts work on. There are T k of them whatever the router says, and with `pad` at most routed_rows: each
// expert's are rounded_rows (base/batch.h), since a GEMM library keeps code for every number of rows that it
// meets. Rows of no slot repeat token 0 with weight 0: they add exact zeros to every sum.
//
// Weights are summed and applied in fp32; a token's slots are added in their order. So results depend neither
// on threads nor on how the tokens of a micro-batch spread over experts.
//
// On a GPU how many rows an expert has is known there alone: the host enqueues work for T k rows and waits
// for nothing. Rows are not padded, and one launch multiplies those of many experts. It has blocks for as
// many tiles of rows as there can be, and each finds its expert by `start`.
#pragma once

#include <cstdint>

#include "base/view.h"

namespace lm {

// Experts of one launch: their addresses are its arguments, 1 KiB of the 4 KiB that a kernel may have.
inline constexpr int64_t kExpertsAtOnce = 128;
// What a block of a launch makes of its product, and how much of each factor it holds at a time.
inline constexpr int kExpertTileRows = 64, kExpertTileColumns = 128, kExpertTileDepth = 32;

// Where the tokens go. int32 arrays, the caller's.
struct Routing {
  int32_t* expert = nullptr;  // [T k] of each slot
  float* weight = nullptr;    // [T k] of each slot
  int32_t* row = nullptr;     // [T k] of each slot
  int32_t* slot = nullptr;    // [rows] of each row; -1: none. Of weigh_rows null: the row's number
  int32_t* token = nullptr;   // [rows] of each row
  int32_t* start = nullptr;   // [E + 1]: rows [start[e], start[e + 1]) are expert e's
};

// How many tiles the rows of `experts` can have: tile first(e) + i has rows [start[e] + i kExpertTileRows,
// ...) of expert e, first(e) = (start[e] - start[0]) / kExpertTileRows + e. Between first(e) and first(e + 1)
// are as many tiles as e's rows need, or one more, which is empty.
constexpr int64_t expert_tiles(int64_t rows, int64_t experts) {
  return rows / kExpertTileRows + experts;
}

// How many rows there are at most: rounded_rows adds at most 31 rows, or an eighth.
constexpr int64_t routed_rows(int64_t slots, int64_t experts, bool pad) {
  return pad ? slots + slots / 8 + 31 * (experts < slots ? experts : slots) : slots;
}

// Sigmoid scores in place of a softmax: s = sigmoid(logits) in fp32, and the choice is of the largest
// s + correction, of equal ones the one with the lowest number; with groups (`groups` of as many neighbours)
// of the experts in the `kept_groups` groups whose two largest add up to most. Weights are scale * s, with
// `renormalise` scale * s / (the sum of the chosen ones + 1e-20).
struct RouteScores {
  bool sigmoid = false;
  const float* correction = nullptr;  // [E]
  int64_t groups = 1, kept_groups = 1;
  float scale = 1;
};
// Keeps a sum of scores that are all 0 from dividing.
inline constexpr float kLeastScores = 1e-20F;

// probability = softmax(logits) in fp32; a token chooses the experts of its k largest logits, of equal ones
// the one with the lowest number. The weight is the probability, or with `renormalise` the probability over
// the sum of the chosen ones in their order, times the expert's factor; `round`: rounded to the logits' type.
struct RouteTokens {
  View logits;                   // [rows, E]; rows behind the tokens are not looked at
  float* probability = nullptr;  // [T, E]; of sigmoid scores these
  Routing routing;
  int64_t tokens = 0, chosen = 0;
  bool renormalise = false, round = false;
  bool pad = false;  // the CPU's alone
  RouteScores scores = {};
  const float* factors = nullptr;  // [E]; null: 1
};

// The gradient of the logits from that of the slots' weights g; the choice itself has none. With the chosen
// ones' weights w before rounding: w_i (g_i - sum of w_j g_j) for the chosen i and 0 for others where they
// are renormalised, else p_i ([i chosen] g_i - sum over the chosen of p_j g_j). Of sigmoid scores s only the
// chosen have one: scale * s_i (1 - s_i) g_i, or where S, the sum of the chosen, divides, scale / S * s_i (1
// - s_i) (g_i - sum of s_j / S g_j). Rows behind the tokens become 0.
struct RouteBackward {
  const float* probability = nullptr;
  Routing routing;
  const float* dweight = nullptr;  // [T k] of each slot
  View dlogits;                    // [rows, E], overwritten
  int64_t tokens = 0, chosen = 0;
  bool renormalise = false;
  RouteScores scores = {};
};

// From the gradients of the slots' weights to those of the weights without their expert's factor, in place:
// times the factor. gradient[e] = the sum over the slots of e of what was there times the weight without the
// factor, in fp64, rounded once; on the CPU in the order of slots.
struct RouteFactors {
  const float* probability = nullptr;  // of a softmax
  Routing routing;
  float* dweight = nullptr;        // [T k] of each slot
  const float* factors = nullptr;  // [E]
  float* gradient = nullptr;       // [E], overwritten; null: they are frozen
  int64_t tokens = 0, chosen = 0, experts = 0;
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

// out[r] = scale * x[r] W_eᵀ of the rows of each expert e of `count`, or scale * x[r] W_e with `columns`,
// with `add` out[r] + that: sums in fp32 in the order of W's columns (rows), rounded once. bf16 and fp16 on
// tensor cores, fp32 without TF32.
struct MultiplyExperts {
  View x;                                   // [rows, in], with `columns` [rows, out]: of all experts
  View out;                                 // [rows, out], with `columns` [rows, in], contiguous
  const int32_t* start = nullptr;           // [count + 1], of the first of these experts
  const void* weight[kExpertsAtOnce] = {};  // each [out, in], contiguous; null: it has no rows
  int64_t count = 0;
  float scale = 1;       // of the products
  bool columns = false;  // the input's gradient from the output's
  bool add = false;      // to what is in `out`
};

// gradient of W_e (+)= dyᵀ x over the rows of each expert e of `count`, in their order, in fp32, rounded
// once; of one without rows 0, or what it is.
struct ExpertGradients {
  View dy;                              // [rows, out]: of all experts
  View x;                               // [rows, in]
  const int32_t* start = nullptr;       // [count + 1], of the first of these experts
  void* gradient[kExpertsAtOnce] = {};  // each [out, in], contiguous; null: not trained
  int64_t count = 0;
  bool overwrite = false;  // not added to what is there
  DType gradient_dtype = DType::kF32;
};

// x[r] += the bias of the row's expert, rounded once. Rows of experts without one stay.
struct AddExpertBiases {
  View x;                                 // [rows, width]: of all experts
  const int32_t* start = nullptr;         // [count + 1], of the first of these experts
  const void* bias[kExpertsAtOnce] = {};  // each [width]; null: none
  int64_t count = 0;
};

// gradient of the bias of expert e (+)= sum of dy over its rows, in fp32 in their order, rounded once; of one
// without rows 0, or what it is.
struct ExpertBiasGradients {
  View dy;                              // [rows, width]: of all experts
  const int32_t* start = nullptr;       // [count + 1], of the first of these experts
  void* gradient[kExpertsAtOnce] = {};  // each [width]; null: not trained
  int64_t count = 0;
  bool overwrite = false;  // not added to what is there
  DType gradient_dtype = DType::kF32;
};

}  // namespace lm
