#include "kernels/cpu_rates.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/arena.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "kernels/library.h"

namespace lm {
namespace {

// Of ordinary numbers, as zeros and denormals may take another time.
class Arrays {
 public:
  Arrays(int64_t count, int64_t elements, DType dtype)
      : bytes_(elements * static_cast<int64_t>(dtype_size(dtype))),
        memory_(DeviceType::kCpu, count * bytes_) {
    constexpr int kThreeQuarters = 0x3F;  // 0x3F3F is 0.75 as bf16, and 0x3F3F3F3F as fp32
    std::memset(memory_.data(), kThreeQuarters, static_cast<size_t>(count * bytes_));
  }
  void* data(int64_t i) const { return memory_.data() + i * bytes_; }

 private:
  int64_t bytes_;
  Memory memory_;
};

// Of some calls the quickest quarter's end: others may have the cores for a while, and never make one
// quicker.
template <class Call>
double quick_seconds(size_t calls, const Call& call) {
  call();  // the first use of code and memory
  std::vector<double> seconds;
  for (size_t i = 0; i < calls; ++i) {
    const double start = monotonic_seconds();
    call();
    seconds.push_back(monotonic_seconds() - start);
  }
  const auto quarter = seconds.begin() + static_cast<ptrdiff_t>(calls / 4);
  std::nth_element(seconds.begin(), quarter, seconds.end());
  return *quarter;
}

// One document of middling length, as many heads as a small model has.
double attention_flops(DType dtype, StreamView stream) {
  constexpr int64_t kTokens = 256, kHeads = 8, kHeadDim = 64, kWidth = kHeads * kHeadDim;
  constexpr size_t kCalls = 9;
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  const Arrays x(8, kTokens * kWidth, dtype), lse(1, kHeads * kTokens, DType::kF32);
  const auto array = [&](int64_t i) { return x.data(i); };
  const int32_t start[] = {0, kTokens};
  const Documents documents{.start = start, .count = 1};
  const float scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  AttentionForward forward{.q = array(0),
                           .k = array(1),
                           .v = array(2),
                           .out = array(3),
                           .lse = static_cast<float*>(lse.data(0)),
                           .documents = documents,
                           .tokens = kTokens,
                           .heads = kHeads,
                           .kv_heads = kHeads,
                           .head_dim = kHeadDim,
                           .q_stride = kWidth,
                           .kv_stride = kWidth,
                           .scale = scale,
                           .dtype = dtype};
  AttentionBackward backward{.dout = array(4),
                             .q = array(0),
                             .k = array(1),
                             .v = array(2),
                             .out = array(3),
                             .lse = static_cast<float*>(lse.data(0)),
                             .dq = array(5),
                             .dk = array(6),
                             .dv = array(7),
                             .documents = documents,
                             .tokens = kTokens,
                             .heads = kHeads,
                             .kv_heads = kHeads,
                             .head_dim = kHeadDim,
                             .q_stride = kWidth,
                             .kv_stride = kWidth,
                             .dq_stride = kWidth,
                             .dkv_stride = kWidth,
                             .scale = scale,
                             .dtype = dtype};
  const int64_t bytes = std::max(kernels.attention_forward_scratch(forward, stream),
                                 kernels.attention_backward_scratch(backward, stream));
  const Memory scratch(DeviceType::kCpu, bytes);
  forward.scratch = backward.scratch = scratch.data();
  const double seconds = quick_seconds(kCalls, [&] {
    kernels.attention_forward(forward, stream);
    kernels.attention_backward(backward, stream);
  });
  // Two products forward and five backward, of half the keys (counting.cpp).
  constexpr double kFlops = 7 * 2 * (kTokens * kTokens / 2.0) * kWidth;
  return kFlops / seconds;
}

// What a product of a small model's size takes beyond its FLOP at the rate of large ones. Each has weights of
// its own, as layers have, so that none lies in the nearest cache.
double gemm_call_seconds(DType dtype, StreamView stream, double gemm_flops) {
  constexpr int64_t kSize = 256, kWeights = 16;
  const Arrays x(kWeights + 2, kSize * kSize, dtype);
  const auto matrix = [&](int64_t i) { return view_of(x.data(i), dtype, kSize, kSize); };
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  int64_t next = 0;
  const double seconds = quick_seconds(101, [&] {
    kernels.gemm({.a = matrix(kWeights), .b = matrix(next++ % kWeights), .out = matrix(kWeights + 1)},
                 stream);
  });
  constexpr double kLeast = 1e-9;  // 0 is one that was not measured
  return std::max(kLeast, seconds - 2.0 * kSize * kSize * kSize / gemm_flops);
}

// Each core decodes a part of a tile, and all cores read it. Where they share no cache (other chiplets, other
// sockets) a line of 64 bytes takes 300 ns from one to another in place of 60, and a step with few tokens
// half as long again: products are timed after decoding and by themselves, and the difference is decoding's.
double decode_bandwidth(DType dtype, StreamView stream) {
  constexpr int64_t kRows = 128, kColumns = 512, kTile = 1024;
  constexpr size_t kCalls = 25;
  const Arrays x(1, kRows * kColumns, dtype), weights(2, kTile * kColumns, dtype), y(1, kRows * kTile, dtype);
  const Arrays codes(1, kTile * kColumns / 4, DType::kBF16);
  const Arrays scales(1, kTile * kColumns / kScaleBlock, DType::kF32);
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  const View tile = view_of(weights.data(0), dtype, kTile, kColumns);
  const Materialise decode{
      .kind = EncodingKind::kNf4,
      .pieces = {static_cast<const std::byte*>(codes.data(0)), static_cast<const std::byte*>(scales.data(0))},
      .out = tile};
  const View x_rows = view_of(x.data(0), dtype, kRows, kColumns),
             y_rows = view_of(y.data(0), dtype, kRows, kTile);
  // Forward, then the input's gradient, whose cores read what others have decoded.
  const auto pass = [&](const View& weight, bool decoded) {
    if (decoded) kernels.materialise(decode, stream);
    kernels.gemm({.a = x_rows, .b = weight, .out = y_rows, .transpose_b = true}, stream);
    if (decoded) kernels.materialise(decode, stream);
    kernels.gemm({.a = y_rows, .b = weight, .out = x_rows}, stream);
  };
  const double both = quick_seconds(kCalls, [&] { pass(tile, true); });
  const double alone =
      quick_seconds(kCalls, [&] { pass(view_of(weights.data(1), dtype, kTile, kColumns), false); });
  const auto bytes = 2 * static_cast<double>(tile.bytes());
  constexpr double kMost = 1e12;  // more than any decodes: the products alone were timed beside others' work
  return both > alone ? std::min(bytes / (both - alone), kMost) : kMost;
}

}  // namespace

CpuRates measure_cpu_rates(DType dtype, StreamView stream, double gemm_flops) {
  LM_CHECK(stream.device == DeviceType::kCpu, "a GPU's rates are its specification");
  return {.attention_flops = attention_flops(dtype, stream),
          .gemm_call_seconds = gemm_call_seconds(dtype, stream, gemm_flops),
          .decode_bandwidth = decode_bandwidth(dtype, stream)};
}

}  // namespace lm
