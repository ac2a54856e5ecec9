#include "kernels/cpu_rates.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/library.h"

namespace lm {
namespace {

template <class Call>
double median_seconds(size_t calls, const Call& call) {
  call();  // the first use of code and memory
  std::vector<double> seconds;
  for (size_t i = 0; i < calls; ++i) {
    const double start = monotonic_seconds();
    call();
    seconds.push_back(monotonic_seconds() - start);
  }
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<ptrdiff_t>(calls / 2), seconds.end());
  return seconds[calls / 2];
}

// One document of middling length, as many heads as a small model has.
double attention_flops(DType dtype, StreamView stream) {
  constexpr int64_t kTokens = 256, kHeads = 8, kHeadDim = 64, kWidth = kHeads * kHeadDim;
  constexpr size_t kCalls = 9;
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  const at::Tensor x = at::ones({8, kTokens, kWidth}, torch_type(dtype));
  const at::Tensor lse = at::ones({kHeads, kTokens}, at::kFloat);
  const auto array = [&](int64_t i) { return x[i].data_ptr(); };
  const int32_t start[] = {0, kTokens};
  const Documents documents{.start = start, .count = 1};
  const float scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  AttentionForward forward{.q = array(0),
                           .k = array(1),
                           .v = array(2),
                           .out = array(3),
                           .lse = lse.data_ptr<float>(),
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
                             .lse = lse.data_ptr<float>(),
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
  constexpr int64_t kAlignment = 64;
  const at::Tensor scratch = at::empty({bytes + kAlignment}, at::kByte);
  auto* aligned = static_cast<std::byte*>(scratch.data_ptr());
  aligned += (kAlignment - reinterpret_cast<uintptr_t>(aligned) % kAlignment) % kAlignment;
  forward.scratch = backward.scratch = aligned;
  const double seconds = median_seconds(kCalls, [&] {
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
  const at::Tensor x = at::ones({kWeights + 2, kSize, kSize}, torch_type(dtype));
  const auto matrix = [&](int64_t i) { return view_of(x[i].data_ptr(), dtype, kSize, kSize); };
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  int64_t next = 0;
  const double seconds = median_seconds(101, [&] {
    kernels.gemm({.a = matrix(kWeights), .b = matrix(next++ % kWeights), .out = matrix(kWeights + 1)},
                 stream);
  });
  return std::max(0.0, seconds - 2.0 * kSize * kSize * kSize / gemm_flops);
}

}  // namespace

CpuRates measure_cpu_rates(DType dtype, StreamView stream, double gemm_flops) {
  LM_CHECK(stream.device == DeviceType::kCpu, "a GPU's rates are its specification");
  return {.attention_flops = attention_flops(dtype, stream),
          .gemm_call_seconds = gemm_call_seconds(dtype, stream, gemm_flops)};
}

}  // namespace lm
