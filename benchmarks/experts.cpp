// How do the products of a mixture's experts compare with one product of as many rows? Each expert has a
// matrix of its own, whose rows are multiplied by themselves, as model/mixers/experts.cpp does it on a CPU.
// Both take turns, so that other work of the machine meets both; the quickest of each counts. Prints one JSON
// line for each number of rows and each of a step's three products.
//
//   bench_experts THREADS ROUNDS EXPERTS IN OUT ROWS [ROWS ...]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/arena.h"
#include "base/clock.h"
#include "kernels/library.h"
#include "kernels/runtime.h"

namespace {

using namespace lm;

struct Sizes {
  int64_t experts = 0, in = 0, out = 0, rows = 0;  // rows: of each expert
};

// bf16 matrices of 0.75, whatever they stand for.
class Matrices {
 public:
  explicit Matrices(const Sizes& s) : memory_(DeviceType::kCpu, bytes_of(s)) {
    std::memset(memory_.data(), 0x3F, static_cast<size_t>(bytes_of(s)));
    const int64_t all = s.experts * s.rows;
    x = take(all, s.in), y = take(all, s.out);
    for (int64_t e = 0; e < s.experts; ++e) {
      weight.push_back(take(s.out, s.in));
      gradient.push_back(take(s.out, s.in));
    }
  }
  View x, y;
  std::vector<View> weight, gradient;

 private:
  View take(int64_t rows, int64_t columns) {
    const View out = view_of(memory_.data() + used_, DType::kBF16, rows, columns);
    used_ += out.bytes();
    return out;
  }
  static int64_t bytes_of(const Sizes& s) {
    return 2 * s.experts * (s.rows * (s.in + s.out) + 2 * s.in * s.out);
  }
  Memory memory_;
  int64_t used_ = 0;
};

enum class Pass { kForward, kInputGradient, kWeightGradient };

// Of `rows` rows from `first` on with the expert's matrix.
Gemm product(const Matrices& m, Pass pass, size_t expert, int64_t first, int64_t rows) {
  const View x = m.x.row_range(first, rows), y = m.y.row_range(first, rows);
  switch (pass) {
    case Pass::kForward:
      return {.a = x, .b = m.weight[expert], .out = y, .transpose_b = true};
    case Pass::kInputGradient:
      return {.a = y, .b = m.weight[expert], .out = x};
    case Pass::kWeightGradient:
      break;
  }
  return {.a = y, .b = x, .out = m.gradient[expert], .transpose_a = true};
}

double seconds_of(const std::vector<Gemm>& products, StreamView stream) {
  const double start = monotonic_seconds();
  for (const Gemm& one : products) library_kernels(DeviceType::kCpu).gemm(one, stream);
  return monotonic_seconds() - start;
}

void measure(const Sizes& s, int rounds, StreamView stream) {
  const Matrices m(s);
  constexpr const char* kNames[] = {"forward", "gradient of the input", "gradient of the weight"};
  for (const Pass pass : {Pass::kForward, Pass::kInputGradient, Pass::kWeightGradient}) {
    const std::vector<Gemm> dense = {product(m, pass, 0, 0, s.experts * s.rows)};
    std::vector<Gemm> grouped;
    for (int64_t e = 0; e < s.experts; ++e)
      grouped.push_back(product(m, pass, static_cast<size_t>(e), e * s.rows, s.rows));
    double best[2] = {1e9, 1e9};
    for (int round = 0; round <= rounds; ++round) {
      const double seconds[2] = {seconds_of(grouped, stream), seconds_of(dense, stream)};
      for (int i = 0; i < 2 && round > 0; ++i) best[i] = std::min(best[i], seconds[i]);  // the first prepares
    }
    const double flops = 2.0 * static_cast<double>(s.experts * s.rows * s.in * s.out);
    std::printf(R"({"product": "%s", "rows": %lld, "grouped_gflops": %.1f, "dense_gflops": %.1f})"
                "\n",
                kNames[static_cast<int>(pass)], static_cast<long long>(s.rows), flops / best[0] / 1e9,
                flops / best[1] / 1e9);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "bench_experts THREADS ROUNDS EXPERTS IN OUT ROWS [ROWS ...]\n");
    return 1;
  }
  const StreamView stream = start_torch(DeviceType::kCpu, std::atoi(argv[1]), true);
  for (int i = 6; i < argc; ++i)
    measure({std::atoll(argv[3]), std::atoll(argv[4]), std::atoll(argv[5]), std::atoll(argv[i])},
            std::atoi(argv[2]), stream);
}
