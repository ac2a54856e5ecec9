// How do products of bf16 matrices compare with fp32 ones on this CPU? Shapes of a small model's training
// step: forward, gradient of the input, gradient of the weight. Types take turns, so that other work of the
// machine meets both; the quickest of each counts. Prints one JSON line per shape.
//
//   bench_products [THREADS] [ROUNDS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/arena.h"
#include "base/clock.h"
#include "base/processor.h"
#include "kernels/library.h"
#include "kernels/runtime.h"

namespace {

using namespace lm;

struct Shape {
  const char* name;
  int64_t rows, columns, inner;
  bool transpose_a, transpose_b;
};
constexpr int64_t kTokens = 1024, kIn = 576, kOut = 1536;
constexpr Shape kShapes[] = {{"forward", kTokens, kOut, kIn, false, true},
                             {"gradient of the input", kTokens, kIn, kOut, false, false},
                             {"gradient of the weight", kOut, kIn, kTokens, true, false}};

class Product {
 public:
  Product(const Shape& s, DType dtype, StreamView stream)
      : stream_(stream),
        memory_(DeviceType::kCpu, (s.rows * s.inner + s.inner * s.columns + s.rows * s.columns) *
                                      static_cast<int64_t>(dtype_size(dtype))) {
    std::byte* at = memory_.data();
    const auto matrix = [&](int64_t rows, int64_t columns, bool transposed) {
      if (transposed) std::swap(rows, columns);
      const View out = view_of(at, dtype, rows, columns);
      constexpr int kThreeQuarters = 0x3F;  // 0x3F3F is 0.75 as bf16, and 0x3F3F3F3F as fp32
      std::memset(at, kThreeQuarters, static_cast<size_t>(out.bytes()));
      at += out.bytes();
      return out;
    };
    gemm_ = {.a = matrix(s.rows, s.inner, s.transpose_a),
             .b = matrix(s.inner, s.columns, s.transpose_b),
             .out = matrix(s.rows, s.columns, false),
             .transpose_a = s.transpose_a,
             .transpose_b = s.transpose_b};
  }
  double seconds() const {
    const double start = monotonic_seconds();
    library_kernels(DeviceType::kCpu).gemm(gemm_, stream_);
    return monotonic_seconds() - start;
  }

 private:
  StreamView stream_;
  Memory memory_;
  Gemm gemm_;
};

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1, rounds = argc > 2 ? std::atoi(argv[2]) : 50;
  const StreamView stream = start_torch(DeviceType::kCpu, threads, true);
  for (const Shape& shape : kShapes) {
    const Product bf16(shape, DType::kBF16, stream), fp32(shape, DType::kF32, stream);
    double best[2] = {1e9, 1e9};
    for (int round = 0; round <= rounds; ++round) {
      const double seconds[2] = {bf16.seconds(), fp32.seconds()};
      for (int i = 0; i < 2 && round > 0; ++i) best[i] = std::min(best[i], seconds[i]);  // the first prepares
    }
    const double flops = 2.0 * static_cast<double>(shape.rows * shape.columns * shape.inner);
    std::printf(R"({"product": "%s", "instructions": "%s", "bf16_gflops": %.1f, "fp32_gflops": %.1f})"
                "\n",
                shape.name, instructions_name(best_instructions()), flops / best[0] / 1e9,
                flops / best[1] / 1e9);
  }
}
