#include "kernels/newton_schulz.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "kernels/norms_formula.h"

namespace lm {
namespace {

constexpr int kIterations = 5;
constexpr float kA = 3.4445F, kB = -4.7750F, kC = 2.0315F;
constexpr float kLeastNorm = 1e-7F;
constexpr int64_t kAligned = 512;

// Parts of a scratch, by their offsets.
struct Parts {
  Parts(int64_t rows, int64_t columns) {
    const int64_t side = std::min(rows, columns);
    granules = ceil_div(rows * columns, kGranuleElements);
    const auto take = [this](int64_t size) { return std::exchange(bytes, bytes + round_up(size, kAligned)); };
    x = take(granules * kGranuleElements * 2);
    y = take(rows * columns * 2);
    gram = take(side * side * 2);
    polynomial = take(side * side * 2);
    sums = take(granules * 8);
    norm = take(4);
  }
  int64_t granules = 0, bytes = 0;
  int64_t x, y, gram, polynomial, sums, norm;
};

}  // namespace

int64_t newton_schulz_scratch_bytes(int64_t rows, int64_t columns) {
  return Parts(rows, columns).bytes;
}

std::byte* newton_schulz(const Kernels& kernels, int64_t rows, int64_t columns, std::byte* scratch,
                         StreamView stream) {
  const Parts parts(rows, columns);
  const int64_t side = std::min(rows, columns);
  const auto matrix = [&](int64_t offset, int64_t r, int64_t c) {
    return view_of(scratch + offset, DType::kBF16, r, c);
  };
  View x = matrix(parts.x, rows, columns), y = matrix(parts.y, rows, columns);
  const View gram = matrix(parts.gram, side, side), polynomial = matrix(parts.polynomial, side, side);
  auto* const sums = reinterpret_cast<double*>(scratch + parts.sums);
  kernels.granule_norms({.x = x.data, .sums = sums, .granules = parts.granules, .dtype = DType::kBF16},
                        stream);
  kernels.normalise({.x = x.data,
                     .elements = rows * columns,
                     .sums = sums,
                     .granules = parts.granules,
                     .norm = reinterpret_cast<float*>(scratch + parts.norm),
                     .least = kLeastNorm},
                    stream);
  const bool tall = rows > columns;
  for (int i = 0; i < kIterations; ++i) {
    kernels.gemm({.a = x, .b = x, .out = gram, .transpose_a = tall, .transpose_b = !tall}, stream);
    kernels.gemm({.a = gram, .b = gram, .out = polynomial, .addend = gram, .scale = kC, .addend_scale = kB},
                 stream);
    kernels.gemm({.a = tall ? x : polynomial,
                  .b = tall ? polynomial : x,
                  .out = y,
                  .addend = x,
                  .transpose_b = tall,
                  .addend_scale = kA},
                 stream);
    std::swap(x, y);
  }
  return static_cast<std::byte*>(x.data);
}

}  // namespace lm
