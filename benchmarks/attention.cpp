// Our side of attention.py: how fast is our CPU attention, against ATen's flash kernels and against the
// machine's GEMM of the same type?
//
//   bench_attention [THREADS = 2] [ROUNDS = 9]
//
// All run in this process, one after the other within each round; the figures are medians. Work is counted as
// the visible (query, key) pairs need it: 4 head_dim flops forward, 10 backward. ATen has no windows and no
// packed documents, so equal documents are its batch, and a window has no peer; nor has the longest sequence,
// of which ATen's backward takes seconds. A table, and a JSON line {case, pass, of_gemm, gemm_gflops,
// of_aten} for each; of_aten is null where there is no peer.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "kernels/attention_path.h"
#include "kernels/library.h"

namespace {

struct Case {
  int64_t documents, length, heads, kv_heads, head_dim, window;
  lm::DType dtype = lm::DType::kBF16;
};

double visible_pairs(const Case& c) {
  double pairs = 0;
  for (int64_t i = 0; i < c.length; ++i) pairs += c.window > 0 ? std::min(i + 1, c.window) : i + 1;
  return pairs * c.documents * c.heads;
}

// Medians of `rounds` interleaved timings, seconds; short calls are repeated within a round.
std::vector<double> medians(const std::vector<std::function<void()>>& calls, int rounds) {
  std::vector<std::vector<double>> seconds(calls.size());
  std::vector<int> repeats;
  for (const auto& call : calls) {
    call();
    const double start = lm::monotonic_seconds();
    call();
    repeats.push_back(std::clamp(static_cast<int>(0.02 / (lm::monotonic_seconds() - start)), 1, 50));
  }
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const double start = lm::monotonic_seconds();
      for (int repeat = 0; repeat < repeats[i]; ++repeat) calls[i]();
      seconds[i].push_back((lm::monotonic_seconds() - start) / repeats[i]);
    }
  }
  std::vector<double> result;
  for (auto& s : seconds) {
    std::nth_element(s.begin(), s.begin() + s.size() / 2, s.end());
    result.push_back(s[s.size() / 2]);
  }
  return result;
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kFloat), y = b.to(at::kFloat);
  return x.sub(y).norm().item<double>() / y.norm().item<double>();
}

// q, k and v are slices of one array, as a model's fused projection leaves them.
struct Tensors {
  at::Tensor qkv, dqkv, out, dout, lse, scratch;
  std::vector<int32_t> start;
  lm::AttentionForward forward;
  lm::AttentionBackward backward;

  Tensors(const Case& c, int threads) {
    const int64_t tokens = c.documents * c.length, q_width = c.heads * c.head_dim,
                  kv_width = c.kv_heads * c.head_dim;
    const int64_t stride = q_width + 2 * kv_width;
    const auto type = c.dtype == lm::DType::kBF16 ? at::kBFloat16 : at::kFloat;
    qkv = at::randn({tokens, stride}).to(type);
    dqkv = at::empty({tokens, stride}, type);
    out = at::empty({tokens, q_width}, type);
    dout = at::randn({tokens, q_width}).to(type);
    lse = at::empty({c.heads, tokens}, at::kFloat);
    for (int64_t i = 0; i <= c.documents; ++i) start.push_back(static_cast<int32_t>(i * c.length));
    const auto at_column = [&](const at::Tensor& t, int64_t column) {
      return static_cast<std::byte*>(t.data_ptr()) + column * t.element_size();
    };
    const float scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
    forward = {.q = at_column(qkv, 0),
               .k = at_column(qkv, q_width),
               .v = at_column(qkv, q_width + kv_width),
               .out = out.data_ptr(),
               .lse = lse.data_ptr<float>(),
               .documents = {.start = start.data(), .count = c.documents},
               .tokens = tokens,
               .heads = c.heads,
               .kv_heads = c.kv_heads,
               .head_dim = c.head_dim,
               .q_stride = stride,
               .kv_stride = stride,
               .window = c.window,
               .scale = scale,
               .dtype = c.dtype};
    backward = {.dout = dout.data_ptr(),
                .q = forward.q,
                .k = forward.k,
                .v = forward.v,
                .out = out.data_ptr(),
                .lse = forward.lse,
                .dq = at_column(dqkv, 0),
                .dk = at_column(dqkv, q_width),
                .dv = at_column(dqkv, q_width + kv_width),
                .documents = {.start = start.data(), .count = c.documents},
                .tokens = tokens,
                .heads = c.heads,
                .kv_heads = c.kv_heads,
                .head_dim = c.head_dim,
                .q_stride = stride,
                .kv_stride = stride,
                .dq_stride = stride,
                .dkv_stride = stride,
                .window = c.window,
                .scale = scale,
                .dtype = c.dtype};
    const lm::StreamView stream{.threads = threads};
    const int64_t bytes = std::max(lm::attention_forward_scratch_cpu(forward, stream),
                                   lm::attention_backward_scratch_cpu(backward, stream));
    scratch = at::empty({bytes + 64}, at::kByte);
    auto* aligned = static_cast<std::byte*>(scratch.data_ptr());
    aligned += (64 - reinterpret_cast<uintptr_t>(aligned) % 64) % 64;
    forward.scratch = backward.scratch = aligned;
  }
  // [documents, heads, length, head_dim] views of columns of [tokens, columns].
  static at::Tensor view(const Case& c, const at::Tensor& t, int64_t column, int64_t heads) {
    return t.narrow(1, column, heads * c.head_dim)
        .view({c.documents, c.length, heads, c.head_dim})
        .transpose(1, 2);
  }
};

// A product of the size that the machine is best at.
constexpr int64_t kGemm = 1536;

std::string name_of(const Case& c) {
  std::string name = std::string(lm::dtype_name(c.dtype)) + " " + std::to_string(c.documents) + "x" +
                     std::to_string(c.length) + ", " + std::to_string(c.heads) + "/" +
                     std::to_string(c.kv_heads) + " heads of " + std::to_string(c.head_dim);
  return c.window > 0 ? name + ", window " + std::to_string(c.window) : name;
}

void measure(const Case& c, int threads, int rounds) {
  Tensors t(c, threads);
  const lm::StreamView stream{.threads = threads};
  const int64_t q_width = c.heads * c.head_dim, kv_width = c.kv_heads * c.head_dim;
  const bool peer = c.window == 0 && c.length < 8192;
  const at::Tensor q = Tensors::view(c, t.qkv, 0, c.heads), k = Tensors::view(c, t.qkv, q_width, c.kv_heads);
  const at::Tensor v = Tensors::view(c, t.qkv, q_width + kv_width, c.kv_heads);
  const at::Tensor dout = Tensors::view(c, t.dout, 0, c.heads);
  std::tuple<at::Tensor, at::Tensor> peer_out;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> peer_gradient;
  const at::Tensor square = at::randn({kGemm, kGemm}).to(t.qkv.scalar_type());
  const at::Tensor product = at::empty_like(square);
  const auto matrix = [&](const at::Tensor& x) { return lm::view_of(x.data_ptr(), c.dtype, kGemm, kGemm); };
  const std::function<void()> gemm = [&] {
    lm::library_kernels(lm::DeviceType::kCpu)
        .gemm({.a = matrix(square), .b = matrix(square), .out = matrix(product)}, stream);
  };
  std::vector<std::function<void()>> forward{[&] { lm::attention_forward_cpu(t.forward, stream); }, gemm};
  std::vector<std::function<void()>> backward{[&] { lm::attention_backward_cpu(t.backward, stream); }, gemm};
  if (peer) {
    forward.push_back(
        [&] { peer_out = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true); });
    backward.push_back([&] {
      peer_gradient = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          dout, q, k, v, std::get<0>(peer_out), std::get<1>(peer_out), 0.0, true);
    });
  }
  const std::vector<double> f = medians(forward, rounds), b = medians(backward, rounds);
  const double flops = visible_pairs(c) * c.head_dim * 4e-9;
  const auto line = [&](const char* pass, const std::vector<double>& seconds, double work,
                        double difference) {
    const double ours = work / seconds[0], product = 2e-9 * kGemm * kGemm * kGemm / seconds[1];
    std::printf("%-42s %-8s %8.2f ms %6.0f GFLOP/s, %3.0f %% of GEMM", name_of(c).c_str(), pass,
                seconds[0] * 1e3, ours, ours / product * 100);
    const std::string of_aten = peer ? std::to_string(seconds[2] / seconds[0]) : "null";
    if (peer)
      std::printf(" | ATen %8.2f ms, %sx, difference %.1e", seconds[2] * 1e3, of_aten.c_str(), difference);
    std::printf(
        "\n{\"case\": \"%s\", \"pass\": \"%s\", \"of_gemm\": %.4f, \"gemm_gflops\": %.5g, \"of_aten\": %s}\n",
        name_of(c).c_str(), pass, ours / product, product, of_aten.c_str());
  };
  const auto flat = [&](const at::Tensor& x) {
    return x.transpose(1, 2).reshape({c.documents * c.length, -1});
  };
  line("forward", f, flops, peer ? relative(t.out, flat(std::get<0>(peer_out))) : 0);
  line("backward", b, flops * 2.5,
       peer ? relative(t.dqkv.narrow(1, 0, q_width), flat(std::get<0>(peer_gradient))) : 0);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2, rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  at::set_num_threads(threads);
  std::printf("%d threads, medians of %d; path %s\n", threads, rounds,
              lm::attention::best_path(lm::DType::kBF16).name);
  const std::vector<Case> cases = {{2, 512, 9, 3, 64, 0},   {1, 2048, 9, 3, 64, 0},
                                   {1, 8192, 3, 1, 64, 0},  {1, 8192, 3, 1, 64, 1024},
                                   {2, 512, 12, 12, 64, 0}, {2, 512, 8, 2, 128, 0},
                                   {16, 64, 9, 3, 64, 0},   {2, 512, 9, 3, 64, 0, lm::DType::kF32}};
  for (const Case& c : cases) {
    measure(c, threads, rounds);
  }
}
