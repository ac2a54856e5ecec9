#include "kernels/counting.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "kernels/attention_chunks.h"
#include "kernels/library.h"
#include "kernels/norms_formula.h"

namespace lm {
namespace {

// A product of a transposed left operand (a weight's gradient) brings it into order first: measured, such
// products of few rows take two and a half times as long beside their FLOP.
constexpr double kTransposed = 2.5;
// GPUs load operands while they multiply, but for products so narrow that there is little to multiply.
constexpr int64_t kNarrow = 128;
// Dropout draws its random numbers: benchmarks/kernels.py has it at a sixth of what other passes reach.
constexpr double kDropout = 6;

constexpr double Cost::*kSums[] = {&Cost::gemm_flops,       &Cost::attention_flops, &Cost::bytes,
                                   &Cost::pass_bytes,       &Cost::decoded_bytes,   &Cost::calls,
                                   &Cost::gemm_calls,       &Cost::fp32_gemm_flops, &Cost::timed_flops,
                                   &Cost::attention_seconds};

Counts& counts_of(StreamView stream) {
  return *static_cast<Counts*>(stream.handle);
}

Cost& counted(StreamView stream) {
  Cost& cost = counts_of(stream).cost;
  cost.calls += 1;
  return cost;
}

double size(DType type) {
  return static_cast<double>(dtype_size(type));
}
double product(int64_t a, int64_t b, int64_t c = 1) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

void pass(StreamView stream, double elements, DType type) {
  counted(stream).pass_bytes += elements * size(type);
}
void move(StreamView stream, double bytes) {
  counted(stream).bytes += bytes;
}

// The elements of one of a kernel's arrays.
template <class Args>
double elements(const Args& a) {
  if constexpr (requires { a.elements; }) {
    return product(a.elements, 1);
  } else if constexpr (requires { a.width; }) {
    return product(a.rows, a.width);
  } else {
    return product(a.rows, a.columns);
  }
}

#define LM_PASS_KERNEL(name, Args, arrays)               \
  void name(const Args& a, StreamView stream) {          \
    pass(stream, double{arrays} * elements(a), a.dtype); \
  }
#include "kernels/kernels.inc"

void rms_norm_forward(const RmsNormForward& a, StreamView stream) {
  const int arrays = (a.residual == nullptr ? 2 : 4) + (a.add_to == nullptr ? 0 : 1);
  pass(stream, product(a.rows, a.groups, a.width) * arrays, a.dtype);
}
void rms_norm_backward(const RmsNormBackward& a, StreamView stream) {
  pass(stream, product(a.rows, a.groups, a.width) * (a.dresidual == nullptr ? 3 : 4), a.dtype);
}
void layer_norm_forward(const LayerNormForward& a, StreamView stream) {
  pass(stream, product(a.rows, a.width) * (a.residual == nullptr ? 2 : 4), a.dtype);
}
void layer_norm_backward(const LayerNormBackward& a, StreamView stream) {
  pass(stream, product(a.rows, a.width) * (a.dresidual == nullptr ? 3 : 4), a.dtype);
}
void rope(const Rope& a, StreamView stream) {
  pass(stream, 2 * product(a.rows, a.heads, a.turned()), a.dtype);
}
void gated_forward(const GatedForward& a, StreamView stream) {
  pass(stream, 3 * product(a.rows, a.ffn), a.dtype);
}
void gated_backward(const GatedBackward& a, StreamView stream) {
  pass(stream, 6 * product(a.rows, a.ffn), a.dtype);
}
void softmax_statistics(const SoftmaxStatistics& a, StreamView stream) {
  pass(stream, product(a.rows, a.columns), a.dtype);
}
void softmax_gradient(const SoftmaxGradient& a, StreamView stream) {
  pass(stream, 2 * product(a.rows, a.columns), a.dtype);
}
void softmax_loss(const SoftmaxLoss& a, StreamView stream) {
  const int arrays =
      3 + (a.weight != nullptr ? 1 : 0) + (a.nll != nullptr ? 1 : 0) + (a.correct != nullptr ? 1 : 0);
  pass(stream, arrays * product(a.rows, 1), DType::kF32);
}
void gather_rows(const GatherRows& a, StreamView stream) {
  move(stream, (a.add ? 3 : 2) * product(a.rows, a.width) * size(a.dtype));
}
void scatter_rows(const ScatterRows& a, StreamView stream) {
  move(stream, product(a.rows + a.out_rows, a.width) * size(a.dtype));
}
void sum_rows(const SumRows& a, StreamView stream) {
  move(stream, product(a.slots, a.width) * (8 + size(a.dtype)));
}
void take_first_rows(const TakeFirstRows& a, StreamView stream) {
  move(stream, product(a.rows, a.width) * (8 + static_cast<double>(a.documents) * 2 * size(a.dtype)));
}
void add_rows(const AddRows& a, StreamView stream) {
  move(stream, product(a.slots, a.width) * (4 + 2 * size(a.gradient_dtype)));
}
void accumulate(const Accumulate& a, StreamView stream) {
  move(stream, product(a.elements, 1) * (size(a.from_dtype) + (a.overwrite ? 1 : 2) * size(a.to_dtype)));
}
void sum_columns(const SumColumns& a, StreamView stream) {
  move(stream, product(a.rows, a.width) * size(a.dtype));
}
void add_bias(const AddBias& a, StreamView stream) {
  move(stream, 2 * product(a.rows, a.width) * size(a.dtype));
}
void adapted_norms(const AdaptedNorms& a, StreamView stream) {
  move(stream, product(a.weight.rows, a.weight.columns) * size(a.weight.dtype));
}
void scale_columns(const ScaleColumns& a, StreamView stream) {
  const int arrays = 2 + (a.addend.defined() ? 1 : 0) + (a.subtrahend.defined() ? 1 : 0);
  pass(stream, arrays * product(a.x.rows, a.x.columns), a.x.dtype);
}
void scale_columns_backward(const ScaleColumnsBackward& a, StreamView stream) {
  pass(stream, (a.rest.defined() ? 4 : 3) * product(a.dy.rows, a.dy.columns), a.dy.dtype);
}
void dropout(const Dropout& a, StreamView stream) {
  pass(stream, kDropout * (a.accumulate ? 3 : 2) * product(a.rows, a.width), a.dtype);
}

// Keys that a document's first tokens see, the diagonal counted half.
double seen_by_first(double tokens, int64_t window) {
  const double seen = window > 0 ? std::min(static_cast<double>(window), tokens) : tokens;
  return tokens * seen - seen * seen / 2;
}
// The same of all queries.
double visible_keys(const Documents& documents, int64_t tokens, int64_t window) {
  if (documents.start == nullptr) {  // of one length, or one more token
    const int64_t length = tokens / documents.count, longer = tokens % documents.count;
    return static_cast<double>(longer) * seen_by_first(static_cast<double>(length + 1), window) +
           static_cast<double>(documents.count - longer) * seen_by_first(static_cast<double>(length), window);
  }
  double sum = 0;
  for (int64_t d = 0; d < documents.count; ++d) {
    const auto past = static_cast<double>(documents.past);
    sum += seen_by_first(past + static_cast<double>(documents.start[d + 1] - documents.start[d]), window);
    if (past > 0) sum -= seen_by_first(past, window);
  }
  return sum;
}
// In chunks: products with all keys that some row of a chunk sees, and passes over these scores.
template <class Args>
void attention_in_chunks(const Args& a, StreamView stream, double products) {
  const ChunkShape shape = chunk_shape(a);
  const int64_t length = std::max<int64_t>(a.tokens / a.documents.count, 1);  // on average
  const Chunk chunk = chunk_of(shape, a.documents.past + length);
  const auto rows = static_cast<double>(std::min(chunk.tokens, length));
  // Beside what is visible: of the keys up to the last row's a row sees half of the last ones; a window hides
  // as many of the first.
  const bool leaves = a.window > 0 && a.window < length;
  const double hidden = static_cast<double>(a.tokens) * rows * (leaves ? 1 : 0.5);
  const double scores =
      (visible_keys(a.documents, a.tokens, a.window) + hidden) * static_cast<double>(a.heads);
  const double parts = static_cast<double>(a.documents.count) *
                       std::ceil(static_cast<double>(length) / rows) *
                       std::ceil(static_cast<double>(a.kv_heads) / static_cast<double>(chunk.kv_heads));
  // Times that a score is read or written, in fp32; in bf16 P and dS are rounded beside.
  double passes = shape.capped ? 12 : 8, rounding = 1;
  if (shape.backward) passes = shape.capped ? 26 : 14, rounding = 1.5;
  if (a.dtype != DType::kF32) passes += rounding;
  Cost& cost = counted(stream);
  cost.attention_flops += products * 2 * scores * static_cast<double>(a.head_dim);
  cost.pass_bytes += size(DType::kF32) * passes * scores;
  cost.calls += parts * (shape.backward ? 22 : 16) - 1;
}

// What ATen's functions do beside the kernel whose rate is known (attention_cuda.cpp): results are theirs,
// and copied to ours; in backward those of key heads are made of each query head, and then summed.
double library_copies(const AttentionForward& a) {
  return 2 * product(a.tokens, a.heads, a.head_dim) * size(a.dtype);
}
double library_copies(const AttentionBackward& a) {
  const double q = product(a.tokens, a.heads, a.head_dim), kv = product(a.tokens, a.kv_heads, a.head_dim);
  const double sums = a.heads == a.kv_heads ? 0 : 2 * (q + kv);
  return (2 * (q + 2 * kv) + sums) * size(a.dtype);
}

// Flash attention multiplies five times where the forward does twice.
template <class Args>
void attention(const Args& a, StreamView stream, double products) {
  const bool gpu = stream.device == DeviceType::kCuda;
  const bool library = library_attends(a.head_dim, a.softcap) && !(a.sinks && a.dtype == DType::kF32);
  if (gpu && !library) return attention_in_chunks(a, stream, products);
  const double keys = visible_keys(a.documents, a.tokens, a.window);
  const double flops = products * 2 * keys * product(a.heads, a.head_dim);
  Cost& cost = counted(stream);
  cost.attention_flops += flops;
  const auto* const rate_of = counts_of(stream).attention_rate;
  if (!gpu || rate_of == nullptr || a.tokens == 0) return;
  const double rate = (*rate_of)({.backward = std::is_same_v<Args, AttentionBackward>,
                                  .head_dim = a.head_dim,
                                  .length = 2 * keys / static_cast<double>(a.tokens),
                                  .pairs = a.documents.count * a.heads});
  if (rate == 0) return;
  cost.timed_flops += flops;
  cost.attention_seconds += flops / rate;
  cost.bytes += library_copies(a);
}
void attention_forward(const AttentionForward& a, StreamView stream) {
  attention(a, stream, 2);
}
void attention_backward(const AttentionBackward& a, StreamView stream) {
  attention(a, stream, 5);
}

void gemm(const Gemm& g, StreamView stream) {
  const int64_t inner = g.transpose_a ? g.a.rows : g.a.columns;
  // The library makes code for products of bf16 alone.
  if (std::set<GemmShape>* const gemms = counts_of(stream).gemms; gemms && g.a.dtype == DType::kBF16)
    gemms->insert({g.out.rows, g.out.columns, inner, g.a.stride, g.b.stride, g.out.stride, g.transpose_a,
                   g.transpose_b, g.addend.defined(), g.scale != 1, g.addend_scale != 1});
  Cost& cost = counted(stream);
  const double flops = 2 * product(g.out.rows, g.out.columns, inner);
  cost.gemm_flops += flops;
  cost.gemm_calls += 1;
  if (g.a.dtype == DType::kF32) cost.fp32_gemm_flops += flops;
  if (stream.device == DeviceType::kCuda && std::min({g.out.rows, g.out.columns, inner}) >= kNarrow) return;
  const auto bytes = [](const View& x) { return product(x.rows, x.columns) * size(x.dtype); };
  const double moved = bytes(g.a) + bytes(g.b) + bytes(g.out) + bytes(g.addend);
  cost.bytes += moved * (g.transpose_a ? kTransposed : 1);
}
void multiply_row(const MultiplyRow& m, StreamView stream) {
  Cost& cost = counted(stream);
  cost.gemm_flops += 2 * product(m.rows, m.columns);
  cost.bytes += product(m.rows, m.columns) * size(m.dtype);
}
void route_tokens(const RouteTokens& a, StreamView stream) {
  pass(stream, product(a.tokens, a.logits.columns, a.chosen + 2), DType::kF32);
}
void route_backward(const RouteBackward& a, StreamView stream) {
  pass(stream, 3 * product(a.tokens, a.dlogits.columns), DType::kF32);
}
void route_factors(const RouteFactors& a, StreamView stream) {
  pass(stream, 3 * product(a.tokens, a.chosen), DType::kF32);
}
void weigh_rows(const WeighRows& a, StreamView stream) {
  pass(stream, (a.other.defined() ? 3 : 2) * product(a.x.rows, a.x.columns), a.x.dtype);
}
void combine_rows(const CombineRows& a, StreamView stream) {
  pass(stream, product(a.chosen + (a.addend.defined() ? 2 : 1), a.out.rows, a.out.columns), a.out.dtype);
}
void gate_rows(const GateRows& a, StreamView stream) {
  pass(stream, (a.other.defined() ? 3 : 2) * product(a.x.rows, a.x.columns), a.x.dtype);
}
void count_routes(const CountRoutes& a, StreamView stream) {
  pass(stream, product(a.probability.rows, a.probability.columns), DType::kF32);
}
void balance_routes(const BalanceRoutes& a, StreamView stream) {
  pass(stream, 3 * product(a.tokens, a.dlogits.columns), DType::kF32);
}
void add_sinks(const AddSinks& a, StreamView stream) {
  pass(stream, 2 * product(a.tokens, a.heads, a.head_dim), a.dtype);
}
void sinks_gradient(const SinksGradient& a, StreamView stream) {
  pass(stream, 2 * product(a.tokens, a.heads, a.head_dim), a.dtype);
}
void clamped_glu_forward(const ClampedGluForward& a, StreamView stream) {
  pass(stream, 3 * product(a.rows, a.ffn), a.dtype);
}
void clamped_glu_backward(const ClampedGluBackward& a, StreamView stream) {
  pass(stream, 6 * product(a.rows, a.ffn), a.dtype);
}
// Products of sorted rows. Each tile of such a kernel reads its factors by itself, and what the library's
// products reach it does not: all of these bytes cost time. (Not measured yet on a GPU.)
void expert_products(const View& x, int64_t columns, int64_t experts, double written, StreamView stream) {
  const double rows = product(x.rows, 1), flops = 2 * rows * product(x.columns, columns);
  Cost& cost = counted(stream);
  cost.gemm_flops += flops;
  if (x.dtype == DType::kF32) cost.fp32_gemm_flops += flops;
  const double tiles = flops / 2 * (1.0 / kExpertTileRows + 1.0 / kExpertTileColumns) * size(x.dtype);
  // Of fewer columns than a tile has, those of a pair's reduced rows, x is still read once.
  const double read = std::max(tiles, product(x.rows, x.columns) * size(x.dtype));
  // Of few rows each expert's weights are still read, or their gradients written.
  const double once = product(std::min(experts, x.rows), x.columns, columns) * size(x.dtype);
  cost.bytes += std::max(read, once) + written;
}
void multiply_experts(const MultiplyExperts& a, StreamView stream) {
  const double written = product(a.out.rows, a.out.columns) * size(a.out.dtype) * (a.add ? 2 : 1);
  expert_products(a.x, a.out.columns, a.count, written, stream);
}
void expert_gradients(const ExpertGradients& a, StreamView stream) {
  const double written =
      product(a.count, a.x.columns, a.dy.columns) * size(a.gradient_dtype) * (a.overwrite ? 1 : 2);
  expert_products(a.x, a.dy.columns, a.count, written, stream);
}
void add_expert_biases(const AddExpertBiases& a, StreamView stream) {
  pass(stream, 2 * product(a.x.rows, a.x.columns), a.x.dtype);
}
void expert_bias_gradients(const ExpertBiasGradients& a, StreamView stream) {
  pass(stream, product(a.dy.rows, a.dy.columns), a.dy.dtype);
}
void copy_rows(const CopyRows& c, StreamView stream) {
  move(stream, static_cast<double>(c.from.bytes() + c.to.bytes()));
}
void scale(const Scale& s, StreamView stream) {
  move(stream, 2 * static_cast<double>(s.out.bytes()));
}
void materialise(const Materialise& m, StreamView stream) {
  counted(stream).decoded_bytes += product(m.out.rows, m.out.columns) * size(m.out.dtype);
}
void granule_norms(const GranuleNorms& n, StreamView stream) {
  move(stream, static_cast<double>(n.granules * kGranuleElements) * size(n.dtype));
}
void normalise(const Normalise& n, StreamView stream) {
  move(stream, 2 * static_cast<double>(n.elements) * size(DType::kBF16));
}
void zero(const View& x, StreamView stream) {
  move(stream, static_cast<double>(x.bytes()));
}

// What no pass calls has no count: null in the table.
constexpr std::nullptr_t decide = nullptr, settle_routes = nullptr, update = nullptr, quantize = nullptr;

Kernels table(DeviceType device) {
  const bool cpu = device == DeviceType::kCpu;
  return {
#define LM_KERNEL(name, Args) .name = name,
#define LM_CPU_KERNEL(name, Args) .name = cpu ? name : nullptr,
#define LM_GPU_KERNEL(name, Args) .name = cpu ? nullptr : name,
#define LM_LIBRARY_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
      .attention_forward_scratch = cpu ? attention_forward_scratch_cpu : attention_forward_scratch_cuda,
      .attention_backward_scratch = cpu ? attention_backward_scratch_cpu : attention_backward_scratch_cuda,
  };
}

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  for (double Cost::*const sum : kSums) this->*sum += other.*sum;
  return *this;
}

Cost& Cost::operator-=(const Cost& other) {
  Cost negative = other;
  negative *= -1;
  return *this += negative;
}

Cost& Cost::operator*=(double times) {
  for (double Cost::*const sum : kSums) this->*sum *= times;
  return *this;
}

CountedTimes::CountedTimes(Counts* counts, int64_t times)
    : counts_(counts), times_(static_cast<double>(times)) {
  if (counts_ != nullptr) before_ = std::exchange(counts_->cost, {});
}

CountedTimes::~CountedTimes() {
  if (counts_ == nullptr) return;
  counts_->cost *= times_;
  counts_->cost += before_;
}

const Kernels& counting_kernels(DeviceType device) {
  static const Kernels cpu = table(DeviceType::kCpu), cuda = table(DeviceType::kCuda);
  return device == DeviceType::kCpu ? cpu : cuda;
}

StreamView counting_stream(Counts& counts, DeviceType device, int threads) {
  return {device, &counts, threads};
}

}  // namespace lm
