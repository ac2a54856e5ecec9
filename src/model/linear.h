// The linear projection y = x Wᵀ (+ bias) (+ s B (A drop(x)) per adapted slice of rows) with its explicit
// backward, with DoRA's lengths of rows where adapters have magnitudes (model/dora.h). Weights and gradients
// are views into a block's arrays; nothing here owns memory but the arena.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "base/encoding_kind.h"
#include "model/dropout.h"

namespace lm {

// A parameter in use. `gradient` is undefined when it is frozen; else it has the weight's shape and the run's
// gradient type.
struct Param {
  View weight;
  View gradient;
  // Of a frozen matrix that is not stored as its elements: where the pieces of each of its parts lie, in row
  // order. Its `weight` has a shape and no data.
  struct EncodedPart {
    int64_t rows = 0;  // 0: there are no more parts
    std::array<const std::byte*, kMostPieces> pieces = {};
  };
  EncodingKind encoding = EncodingKind::kPlain;
  std::array<EncodedPart, kMostParts> parts = {};
};

// A vector of the files that nobody trains: fp32.
struct Buffer {
  View values;  // [n]
};

// LoRA on rows [first, first + rows) of a projection's output.
struct Adapter {
  int64_t first = 0;
  int64_t rows = 0;
  Param a;               // [r, in]
  Param b;               // [rows, r]
  Param magnitude = {};  // [rows]; undefined weight = the rows' lengths are not trained
  // PiSSA: A0 [r, in] and -B0 [rows, r], frozen, in the model's type; they see the inputs that A sees, with
  // the same dropped, so that training begins at the base. Undefined: none.
  View start_a = {}, start_b = {};
  int64_t rank() const { return a.weight.rows + start_a.rows; }  // of both pairs
  float scale = 1;
  DropoutMask dropout = {};  // of its input, while training
};

// IA3 on rows [first, first + rows) of a projection's output.
struct OutputScale {
  int64_t first = 0;
  int64_t rows = 0;
  Param factors;  // [rows]
};

// A trained copy of the bias's rows [first, first + rows), used in their place.
struct BiasCopy {
  int64_t first = 0;
  int64_t rows = 0;
  Param values;  // [rows]
};

struct Linear {
  Param weight;  // [out, in]
  Param bias;    // [out]; undefined weight = no bias
  std::vector<Adapter> adapters;
  std::vector<BiasCopy> biases = {};     // where the bias is frozen
  std::vector<OutputScale> scales = {};  // IA3 (model/ia3.h); there are no adapters then
  Param input_scale = {};                // [in]; undefined weight = the input is not scaled
  // Whether something beside the weight and the bias is trained, whose gradient needs the forward pass.
  bool adapted() const { return !adapters.empty() || !scales.empty() || input_scale.weight.defined(); }
};

// What the backward pass wants back from the forward pass: A drop(x) per adapter, [T, rank()], behind it
// A0's. The rest is there where rows have trained lengths or outputs are scaled.
struct LinearSaved {
  std::vector<View> reduced;
  View together;        // all of these, where one product makes them (model/adapter_products.h)
  View product;         // z [T, out], before it is scaled
  View norms, factors;  // n and m / n [out], fp32; columns of other rows may be uninitialised
};

// Allocates what forward saves, in the arena.
LinearSaved allocate_saved(const Context& context, const Linear& linear, int64_t rows);

// Calls body(first, rows, part) for the rows of each of `parts`, Adapters or OutputScales in the order of
// their rows, and with null for the rows between: all of W's.
template <class Part, class Body>
void each_run(const Linear& linear, const std::vector<Part>& parts, const Body& body) {
  int64_t row = 0;
  for (const Part& part : parts) {
    if (row < part.first) body(row, part.first - row, nullptr);
    body(part.first, part.rows, &part);
    row = part.first + part.rows;
  }
  const int64_t all = linear.weight.weight.rows;
  if (row < all) body(row, all - row, nullptr);
}

// y [T, out] = linear(x [T, in]); with `residual` [T, out] it is added in the GEMM (rounded once).
struct LinearForward {
  View x, y;
  View residual = {};
};
void linear_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const LinearForward& pass, LinearSaved& saved);

// The same of several runs of rows through a matrix without anything trained: each has the bits that it has
// by itself, and a quantized matrix is materialised once for all of them.
void linear_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    std::span<const LinearForward> runs);

// dx [T, in] = dy W + the adapters' part; parameter gradients are added, or overwritten when `first` (the
// step's first micro-batch). `dx` may be undefined when nobody needs it.
struct LinearBackward {
  View x, dy;
  View dx = {};
};
void linear_backward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     const LinearBackward& pass, const LinearSaved& saved, bool first);

// The two passes' halves on their own: dx = dy W (+ addend, which may be dx) without adapters, and what
// backward wants without y.
void linear_input_gradient(const Context& context, const Linear& linear, const View& dy, const View& dx,
                           const View& addend = {});
// The former of several runs of rows, as linear_forward.
void linear_input_gradient(const Context& context, const Linear& linear,
                           std::span<const LinearBackward> runs);

// Where products_first (model/adapter_products.h) backward has two halves, of which the first needs no x: dx,
// which may be undefined, and in the arena what the second needs beside x and dy.
View adapted_input_gradient(const Context& context, const Linear& linear, const DeviceBatch& batch,
                            const View& dy, const View& dx);
struct ReducedGradients {
  View all;  // s dy B of the adapters, side by side
  bool first = false;
};
void add_trained_gradients(const Context& context, const Linear& linear, const DeviceBatch& batch,
                           const LinearBackward& pass, const LinearSaved& saved,
                           const ReducedGradients& reduced);
void linear_save(const Context& context, const Linear& linear, const DeviceBatch& batch, const View& x,
                 LinearSaved& saved);

// y [T, out] += bias [out].
void add_bias(const Context& context, const View& bias, const View& y);

// gradient (+)= dyᵀ x in the gradient's type: with a bf16 product and an fp32 gradient on the CPU the GEMM
// goes to scratch and is added in fp32; elsewhere the GEMM itself accumulates.
void add_weight_gradient(const Context& context, const View& gradient, const View& dy, const View& x,
                         bool first);

// gradient [n] (+)= sums [n] (fp32).
void add_vector_gradient(const Context& context, const View& gradient, const float* sums, bool first);

}  // namespace lm
