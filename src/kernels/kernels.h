// The arguments of every kernel: a struct of raw pointers and sizes, then the stream. Two launchers implement
// each with the same signature and the same per-element formula: `x_cpu.cpp` (the reference of the GPU test)
// and `x.cu`; kernels.inc lists them. A rank asks `kernels(device)` once and calls through the table.
//
// Memory belongs to the caller; on the GPU every pointer is device memory and the call only enqueues. No
// kernel allocates. Results do not depend on the number of threads or blocks. DType is kF32, kBF16 or
// kF16 throughout, of gradients kF32 or kBF16; rounding is to nearest even except where a formula says
// otherwise.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/activation.h"
#include "base/checksum.h"
#include "base/cuda.h"
#include "base/dtype.h"
#include "base/encoding_kind.h"
#include "base/view.h"
#include "kernels/attention_arguments.h"
#include "kernels/clamped_glu_arguments.h"
#include "kernels/decision_arguments.h"
#include "kernels/dora_arguments.h"
#include "kernels/expert_arguments.h"
#include "kernels/router_arguments.h"
#include "kernels/sink_arguments.h"
#include "optim/rules/rules.h"

namespace lm {

// Reductions over rows add this many rows in order, then those partial sums in order.
inline constexpr int64_t kRowBlock = 64;

// How a norm's output follows from n, its normalised input in fp32, and its weight.
enum class WeightForm : uint8_t {
  kAfterRounding,   // weight * dtype(n)
  kBeforeRounding,  // dtype(weight * n)
  kOffset,          // dtype((1 + weight) * n)
};

// n = x * rstd, rstd = 1 / sqrt(mean(x²) + eps) in fp32, after x = sum = x + residual when a residual is
// given; out = n with its weight, or with `add_to` dtype(add_to + dtype(factor * that)). Rows are `groups`
// vectors of `width` elements side by side (the heads of q and k); the strides are between rows, in elements.
struct RmsNormForward {
  const void* x = nullptr;         // [rows, groups, width]
  const void* residual = nullptr;  // null, or [rows, width] (groups = 1, stride = width)
  const void* weight = nullptr;    // [width]; null: 1
  void* sum = nullptr;             // x + residual, rounded; null iff residual is null; may be x
  const void* add_to = nullptr;    // null, or [rows, width] (groups = 1, stride = width); may be out
  void* out = nullptr;             // may be x
  float* rstd = nullptr;           // [rows, groups]; null when not wanted
  int64_t rows = 0, groups = 1, width = 0;
  int64_t x_stride = 0, out_stride = 0;
  float eps = 0;
  float factor = 1;  // of what is added to add_to
  WeightForm form = WeightForm::kAfterRounding;
  DType dtype = DType::kF32;
};

// dx = (residual gradient +) rstd * (w*dy - n * mean(w*dy * n)), n = x * rstd, w the weight or 1 + it;
// dweight[j] = sum over rows and groups of dy * n, n rounded where the forward pass rounds it, added in fp32
// by kRowBlock rows.
struct RmsNormBackward {
  const void* dy = nullptr;         // [rows, groups, width], stride dy_stride
  const void* x = nullptr;          // the normalised input (with a residual the sum), stride x_stride
  const void* weight = nullptr;     // null: 1
  const float* rstd = nullptr;      // [rows, groups]
  const void* dresidual = nullptr;  // null, or [rows, width]: added to dx in fp32 before rounding; may be dx
  void* dx = nullptr;               // stride dx_stride; may be dy
  float* dweight = nullptr;         // [width], overwritten; null when the weight is frozen
  float* partial = nullptr;         // scratch [ceil(rows / kRowBlock), width]; may be null when dweight is
  int64_t rows = 0, groups = 1, width = 0;
  int64_t dy_stride = 0, x_stride = 0, dx_stride = 0;
  WeightForm form = WeightForm::kAfterRounding;
  DType dtype = DType::kF32;
};

// LayerNorm: n = (x - mean) * rstd, rstd = 1 / sqrt(variance + eps) in fp32, the variance of the width's
// elements about their mean; out = dtype(weight * n + bias), weight or 1 + weight. A residual as in
// RmsNormForward.
struct LayerNormForward {
  const void* x = nullptr;         // [rows, width]
  const void* residual = nullptr;  // null, or [rows, width], stride = width
  const void* weight = nullptr;    // [width]
  const void* bias = nullptr;      // [width]; null: 0
  void* sum = nullptr;             // x + residual, rounded; null iff residual is null; may be x
  void* out = nullptr;             // may be x
  float* rstd = nullptr;           // [rows]; null when not wanted
  int64_t rows = 0, width = 0;
  int64_t x_stride = 0, out_stride = 0;
  float eps = 0;
  bool offset = false;  // 1 + weight
  DType dtype = DType::kF32;
};

// dx = (residual gradient +) rstd * (w*dy - mean(w*dy) - n * mean(w*dy * n)), with the row's mean computed as
// forward did; dweight[j] = sum of dy * n, dbias[j] = sum of dy, added in fp32 by kRowBlock rows.
struct LayerNormBackward {
  const void* dy = nullptr;         // [rows, width], stride dy_stride
  const void* x = nullptr;          // the normalised input (with a residual the sum), stride x_stride
  const void* weight = nullptr;     // [width]
  const float* rstd = nullptr;      // [rows]
  const void* dresidual = nullptr;  // null, or [rows, width]: added to dx in fp32 before rounding; may be dx
  void* dx = nullptr;               // stride dx_stride; may be dy
  float* dweight = nullptr;         // [width], overwritten; null when the weight is frozen
  float* dbias = nullptr;           // the same of the bias
  float* partial = nullptr;         // scratch [2 ceil(rows / kRowBlock), width]; null when both are
  int64_t rows = 0, width = 0;
  int64_t dy_stride = 0, x_stride = 0, dx_stride = 0;
  bool offset = false;
  DType dtype = DType::kF32;
};

// Rotation in place of the first `dim` features of `heads` neighbouring heads per row: (a c - b s, b c + a s)
// for a = x[i], b = x[i + dim/2], or with `neighbours` a = x[2i], b = x[2i + 1]; `inverse` rotates by the
// negative angle (the backward pass). Cosines and sines may hold a factor, which either direction multiplies
// by.
struct Rope {
  void* x = nullptr;           // [rows, heads, head_dim], stride x_stride
  const float* cos = nullptr;  // [positions, dim / 2]
  const float* sin = nullptr;
  const int32_t* position = nullptr;  // [rows]
  int64_t rows = 0, heads = 0, head_dim = 0, x_stride = 0;
  int64_t dim = 0;  // 0: head_dim
  bool neighbours = false;
  bool inverse = false;
  DType dtype = DType::kF32;

  int64_t turned() const { return dim > 0 ? dim : head_dim; }
};

// x[r, j] *= f, f = dtype(1 + slope * ln(1 + floor(position[r] / period))): the scale of queries far into a
// long text. The gradient of x is multiplied alike.
struct ScaleByPosition {
  void* x = nullptr;                  // [rows, width], stride
  const int32_t* position = nullptr;  // [rows]
  int64_t rows = 0, width = 0, stride = 0;
  float slope = 0;
  int64_t period = 1;
  DType dtype = DType::kF32;
};

// out[t, j] = activation(gate) * up with gate = gate_up[t, j], up = gate_up[t, F + j]. bf16 rounds
// activation(gate), as transformers does. silu(-inf) is NaN, as torch's.
struct GatedForward {
  const void* gate_up = nullptr;  // [rows, 2F]
  void* out = nullptr;            // [rows, F]
  int64_t rows = 0, ffn = 0;
  Activation activation = Activation::kSilu;
  DType dtype = DType::kF32;
};

// In place: dh becomes h (the forward's output, for the down projection's weight gradient), gate_up becomes
// its own gradient.
struct GatedBackward {
  void* gate_up = nullptr;  // [rows, 2F]: in gate | up, out dgate | dup
  void* dh = nullptr;       // [rows, F]: in dh, out h
  int64_t rows = 0, ffn = 0;
  Activation activation = Activation::kSilu;
  DType dtype = DType::kF32;
};

// out = activation(x), contiguous; out may be x.
struct ActivationForward {
  const void* x = nullptr;
  void* out = nullptr;
  int64_t elements = 0;
  Activation activation = Activation::kGeluTanh;
  DType dtype = DType::kF32;
};

// In place, as GatedBackward: dh becomes h, x its own gradient.
struct ActivationBackward {
  void* x = nullptr;   // in x, out dx
  void* dh = nullptr;  // in dh, out h
  int64_t elements = 0;
  Activation activation = Activation::kGeluTanh;
  DType dtype = DType::kF32;
};

// In place: logits become dtype(scale * logit), or with a cap c dtype(c tanh(scale * logit / c)).
struct CapLogits {
  void* logits = nullptr;  // [rows, columns], stride in elements
  int64_t rows = 0, columns = 0, stride = 0;
  float scale = 1;
  float cap = 0;  // 0: none
  DType dtype = DType::kF32;
};

// One vocabulary segment of the loss: updates each row's running (max, sum of exp(logit - max)), picks the
// target's logit, and updates whether the target is the argmax so far. Segments are visited in order;
// `first_segment` starts the running values. Of equal largest logits the one with the lowest column is the
// argmax, as in torch.argmax.
struct SoftmaxStatistics {
  const void* logits = nullptr;     // [rows, columns], stride in elements
  const int32_t* target = nullptr;  // [rows], in the whole vocabulary
  float* max = nullptr;             // [rows]
  float* sum = nullptr;             // [rows]
  float* target_logit = nullptr;    // [rows]
  float* correct = nullptr;         // [rows]: 1 if the target is the argmax, else 0; null: not wanted
  int64_t rows = 0, columns = 0, stride = 0;
  int64_t first_column = 0;  // of the segment in the vocabulary
  bool first_segment = false;
  DType dtype = DType::kF32;
};

// In place: logits become (exp(logit - lse) - [column = target]) * (scale * weight[row]), lse = max +
// log(sum); of logits that CapLogits has made, times logit_scale * (1 - (logit / logit_cap)²), the second
// factor with a cap.
struct SoftmaxGradient {
  void* logits = nullptr;  // [rows, columns]
  const int32_t* target = nullptr;
  const float* max = nullptr;
  const float* sum = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
  int64_t first_column = 0;
  float scale = 1;                // 1 / the divisor of the optimizer step's sum of losses
  const float* weight = nullptr;  // [rows], of each row's loss; null: 1
  float logit_scale = 1, logit_cap = 0;
  DType dtype = DType::kF32;
};

// nll[r] = max + log(sum) - target_logit; then *total += the sum of weight[r] * nll[r] in fp64 in row order,
// and *correct_total += the sum of correct[r], without weights.
struct SoftmaxLoss {
  const float* max = nullptr;
  const float* sum = nullptr;
  const float* target_logit = nullptr;
  const float* weight = nullptr;   // [rows]; null: 1
  const float* correct = nullptr;  // [rows], from the statistics; null together with correct_total
  float* nll = nullptr;            // [rows]; null when not wanted
  double* total = nullptr;
  double* correct_total = nullptr;
  int64_t rows = 0;
};

// out[t] = dtype(scale * table[index[t]]), or with `add` dtype(out[t] + that).
struct GatherRows {
  const void* table = nullptr;     // [*, width]
  const int32_t* index = nullptr;  // [rows]
  void* out = nullptr;             // [rows, width]
  int64_t rows = 0, width = 0;
  float scale = 1;
  bool add = false;
  DType dtype = DType::kF32;
};

// out = 0 except out[index[r]] = source[r]; indices are distinct: the gradient of a gather of distinct rows.
struct ScatterRows {
  const void* source = nullptr;    // [rows, width]
  const int32_t* index = nullptr;  // [rows], ascending
  void* out = nullptr;             // [out_rows, width], overwritten
  int64_t rows = 0, out_rows = 0, width = 0;
  DType dtype = DType::kF32;
};

// sums[s] += source[order[k]] for k in [start[s], start[s + 1]) in that order, in fp32: the gradient of a
// gather, one row of `sums` per distinct index.
struct SumRows {
  const void* source = nullptr;    // [*, width]
  const int32_t* order = nullptr;  // positions, grouped by slot
  const int32_t* start = nullptr;  // [slots + 1]
  float* sums = nullptr;           // [slots, width]
  int64_t slots = 0, width = 0;
  DType dtype = DType::kF32;
};

// sums[i] += row i of each document, in the order of documents, in fp32, and that row becomes zero: the
// gradient of rows with which every document begins. A shorter document has fewer of them.
struct TakeFirstRows {
  void* x = nullptr;               // [*, width], stride
  const int32_t* start = nullptr;  // [documents + 1], from row `first` of x
  float* sums = nullptr;           // [rows, width]
  int64_t first = 0, documents = 0, rows = 0, width = 0, stride = 0;
  DType dtype = DType::kF32;
};

// gradient[row[s]] += scale * sums[s], rounded to the gradient's type.
struct AddRows {
  const float* sums = nullptr;   // [slots, width]
  const int32_t* row = nullptr;  // [slots], distinct
  void* gradient = nullptr;      // [*, width]
  int64_t slots = 0, width = 0;
  float scale = 1;
  DType gradient_dtype = DType::kF32;
};

// to = to + from (overwrite: to = from), in fp32, rounded once to to_dtype.
struct Accumulate {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t elements = 0;
  DType to_dtype = DType::kF32, from_dtype = DType::kF32;
  bool overwrite = false;
};

// sums[j] = sum over rows of x[r, j] in fp32 in the order of RmsNormBackward: a bias's gradient.
struct SumColumns {
  const void* x = nullptr;   // [rows, width], stride
  float* sums = nullptr;     // [width], overwritten
  float* partial = nullptr;  // scratch [ceil(rows / kRowBlock), width]
  int64_t rows = 0, width = 0, stride = 0;
  DType dtype = DType::kF32;
};

// x[r, j] += bias[j].
struct AddBias {
  void* x = nullptr;  // [rows, width], stride
  const void* bias = nullptr;
  int64_t rows = 0, width = 0, stride = 0;
  DType dtype = DType::kF32;
};

// out = x * keep / (1 - p), keep = philox(key, sample, position, feature) >= p. The same arguments give the
// same mask, so backward and recomputation replay it. `accumulate`: out += instead.
struct Dropout {
  const void* x = nullptr;            // [rows, width]
  void* out = nullptr;                // may be x
  const int32_t* sample = nullptr;    // [rows]: index of the example in the run's order
  const int32_t* position = nullptr;  // [rows]: position in the example
  int64_t rows = 0, width = 0;
  uint64_t key = 0;  // from (seed, purpose, step, tensor): see base/philox.h
  float p = 0;
  bool accumulate = false;
  DType dtype = DType::kF32;
};

// sums[g] = sum of squares of granule g (4096 elements) in fp64: element i of a granule goes to lane i mod 64
// in order, then lanes are added by the tree (l, l + 32), (l, l + 16), ... (0, 1). A NaN is
// 0x7FF8000000000000.
struct GranuleNorms {
  const void* x = nullptr;
  double* sums = nullptr;  // [granules]
  int64_t granules = 0;
  DType dtype = DType::kF32;
};

// x = bf16(x / max(norm, least)) with norm = bf16(root of the sum of `sums`), granule_norms of x: added in
// fp64, the i-th to lane i mod 64, then lanes as there.
struct Normalise {
  void* x = nullptr;  // bf16
  int64_t elements = 0;
  const double* sums = nullptr;  // [granules]
  int64_t granules = 0;
  float* norm = nullptr;  // the divisor of x
  float least = 0;
};

// State of a rule with factored second moments (optim/rules/factored.h), which is called with whole matrices
// or vectors.
struct FactoredState {
  int64_t rows = 1, columns = 0;  // for a vector: its elements
  void* row = nullptr;            // [rows], dtype
  void* column = nullptr;         // [columns]
  void* vector = nullptr;         // [columns], for a vector, in place of row and column
  float* scratch = nullptr;       // [factored_scratch(rows, columns)]
  DType dtype = DType::kF32;
};

// A matrix updated by Muon (Newton–Schulz; optim/rules/muon.h, kernels/newton_schulz.h), in two calls: the
// first updates state[0] and writes the direction, with zeros up to a whole granule; the second updates the
// weight. Only the second uses the weight, only the first the gradient.
struct MuonState {
  enum class Call : int64_t { kNone, kDirection, kStep };  // no padding after it: a GPU's argument
  Call call = Call::kNone;
  int64_t rows = 0, columns = 0;
  void* direction = nullptr;  // [rows, columns], bf16
};

// One fused pass of an optimizer's rule: reads gradient and state, writes state and the working weight. The
// gradient is multiplied by gradient_scale (clipping), then the rule's own lines follow (optim/rules), in
// fp32 with exactly those operations (nothing contracted; sqrt and / correctly rounded). Every NaN that is
// stored is 0x7FC00000. Quantized state (optim/rules/codes.h) is dequantized and quantized again; non-finite
// values become 0, and so does a block of numbers below 2^-126.
struct RuleUpdate {
  RuleScalars rule;
  const void* gradient = nullptr;           // [elements], gradient_dtype
  void* weight = nullptr;                   // working weight, weight_dtype
  void* master = nullptr;                   // kSplit: uint16 low halves; kF32: float; else null
  void* state[Rules::kMostStates] = {};     // StateOf<rule>[elements] or, without, null; of codes: scales
  uint8_t* codes[Rules::kMostStates] = {};  // for quantized state, but null for small tensors
  FactoredState factored = {};              // for factored second moments, in place of state
  MuonState muon = {};                      // for Muon's matrices, in addition to state[0]
  int64_t elements = 0;                     // quantized: a multiple of 256
  DType gradient_dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  MasterForm form = MasterForm::kWeight;
  float gradient_scale = 1;
  // GPU: the step's, which replaces gradient_scale, and skips the update; null: the host has decided.
  const StepDecision* decision = nullptr;
  uint64_t rounding_key = 0;  // kStochastic: from (seed, purpose, step, tensor)
  // kStochastic: index of element 0 in that key's sequence; a multiple of 64 for quantized state.
  int64_t first_index = 0;
};

// out = A B (+ addend), with optional transposition of A and B: products of matrices, summed in fp32 and
// rounded once to out's type. With bf16 matrices and an fp32 `out` (GPUs only) nothing is rounded.
struct Gemm {
  View a, b, out;    // out may be addend
  View addend = {};  // undefined: none; of out's shape
  bool transpose_a = false, transpose_b = false;
  float scale = 1;         // of the product
  float addend_scale = 1;  // of the addend
};

// out[r] = scale * (weight[r] · x) (+ addend[r]), summed in fp32 and rounded once: one token's product. The
// matrix is read once, at the memory's rate, while a GEMM library would pack it first.
struct MultiplyRow {
  const void* x = nullptr;       // [columns]
  const void* weight = nullptr;  // [rows, columns], stride in elements
  const void* addend = nullptr;  // null, or [rows]; may be out
  void* out = nullptr;           // [rows]
  int64_t rows = 0, columns = 0, stride = 0;
  float scale = 1;
  DType dtype = DType::kF32;
};

// to = from, of the same shape, strided on both sides; rounded if to's type is smaller.
struct CopyRows {
  View from, to;
};

// out = x * factor, rounded once; contiguous, of one type and shape; out may be x.
struct Scale {
  View x, out;
  float factor = 1;
  const void* device_factor = nullptr;  // in place of factor: an element of x's type in device memory
};

// Dequantizes a matrix of the files, or some of its rows or columns, from its components (spec/encoding.h);
// `out` is contiguous. With 4-bit codes a range of rows begins at a multiple of kScaleBlock elements, and for
// a range of columns all widths and the first are multiples of it. Formulas are bitsandbytes' in fp32,
// rounded once: value of the code * scale of its block (a double scale: value of its code * scale of the
// scales + their mean), or integer * scale of the row * fp32(1 / 127). MXFP4's is value of the code *
// 2^(scale
// - 127), of ranges and widths that are multiples of kMxBlock.
struct Materialise {
  EncodingKind kind = EncodingKind::kNf4;
  std::array<const std::byte*, kMostPieces> pieces = {};
  View out;
  int64_t first = 0;    // first element of the matrix in out
  int64_t columns = 0;  // of the matrix; 0: out's

  int64_t width() const { return columns > 0 ? columns : out.columns; }
};

// Quantizes a part of a matrix, on the CPU, to codes and fp32 scales: for 4-bit codes `x` begins at a
// multiple of kScaleBlock and ends at one or with the matrix; for 8-bit codes it is whole rows. A block's
// scale is its largest magnitude; numbers are divided by it (multiplied by its reciprocal in whole blocks)
// and become the nearest code.
struct QuantizeMatrix {
  EncodingKind kind = EncodingKind::kNf4;  // double quantization: the step before quantize_scales
  const void* x = nullptr;
  int64_t elements = 0, columns = 0;
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  DType dtype = DType::kF32;
};

// Double quantization: `codes` of all scales of a matrix, and in `nested` their mean (summed in fp64) and the
// scales of the differences from it.
void quantize_scales(std::span<const float> scales, uint8_t* codes, float* nested);

// The launchers of one device.
struct Kernels {
#define LM_KERNEL(name, Args) void (*name)(const Args&, StreamView) = nullptr;
#define LM_CPU_KERNEL LM_KERNEL
#define LM_GPU_KERNEL LM_KERNEL
#define LM_LIBRARY_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
  ChunkSumsKernel chunk_sums = nullptr;  // null in the counting table
  // Scratch bytes of a call; also for LibTorch's attention.
  int64_t (*attention_forward_scratch)(const AttentionForward&, StreamView) = nullptr;
  int64_t (*attention_backward_scratch)(const AttentionBackward&, StreamView) = nullptr;
};

// The table of a device; throws Error(12) for CUDA in an executable without it.
const Kernels& kernels(DeviceType device);

// CPU attention (GPUs have LibTorch's flash kernels). Scratch is for all threads of the stream together, the
// same on every machine.
void attention_forward_cpu(const AttentionForward& args, StreamView stream);
void attention_backward_cpu(const AttentionBackward& args, StreamView stream);
int64_t attention_forward_scratch_cpu(const AttentionForward& args, StreamView stream);
int64_t attention_backward_scratch_cpu(const AttentionBackward& args, StreamView stream);

}  // namespace lm
