#include "weights/low_rank.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "kernels/cpu_features.h"

namespace lm {
namespace {

constexpr int64_t kMore = 16;     // oversampling: directions beyond the requested rank
constexpr int kIterations = 4;    // each multiplies the ratio of two singular values with its square
constexpr int64_t kLanes = 32;    // directions processed at once, in registers
constexpr int64_t kColumns = 64;  // of the matrix; their sums fit a thread's L1 cache

// n vectors of `width` numbers, a multiple of kLanes; vector after vector.
struct Directions {
  Directions(int64_t size, int64_t wide)
      : n(size), width(wide), values(static_cast<size_t>(size * wide), 0.0F) {}
  int64_t n, width;
  std::vector<float> values;
  float* row(int64_t i) { return values.data() + i * width; }
  const float* row(int64_t i) const { return values.data() + i * width; }
};

// Row-major.
struct Matrix {
  const float* values;
  int64_t rows, columns;
};

// Row i of matrix * in, for i in [begin, end).
[[gnu::always_inline]] inline void rows_of_product(const Matrix& matrix, const Directions& in,
                                                   Directions& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t d = 0; d < in.width; d += kLanes) {
      float sum[kLanes] = {};
      for (int64_t j = 0; j < matrix.columns; ++j) {
        const float* const from = in.row(j) + d;
        for (int64_t lane = 0; lane < kLanes; ++lane)
          sum[lane] += matrix.values[i * matrix.columns + j] * from[lane];
      }
      std::copy(sum, sum + kLanes, out.row(i) + d);
    }
  }
}

// Row j of transpose(matrix) * in, for j in [begin, end).
[[gnu::always_inline]] inline void columns_of_product(const Matrix& matrix, const Directions& in,
                                                      Directions& out, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) std::fill(out.row(j), out.row(j) + out.width, 0.0F);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t d = 0; d < in.width; d += kLanes) {
      float from[kLanes];
      std::copy(in.row(i) + d, in.row(i) + d + kLanes, from);
      for (int64_t j = begin; j < end; ++j) {
        float* const to = out.row(j) + d;
        for (int64_t lane = 0; lane < kLanes; ++lane)
          to[lane] += matrix.values[i * matrix.columns + j] * from[lane];
      }
    }
  }
}

// The same, compiled for AVX2 without fused operations: the bits are the same. (Not by target_clones, which
// dispatches before a thread sanitizer is ready for it.)
#if defined(__x86_64__)
#define LM_AVX2 [[gnu::target("avx2")]]
#else
#define LM_AVX2
#endif
LM_AVX2 void rows_of_product_avx2(const Matrix& matrix, const Directions& in, Directions& out, int64_t begin,
                                  int64_t end) {
  rows_of_product(matrix, in, out, begin, end);
}
LM_AVX2 void columns_of_product_avx2(const Matrix& matrix, const Directions& in, Directions& out,
                                     int64_t begin, int64_t end) {
  columns_of_product(matrix, in, out, begin, end);
}

// Symmetric [n, n] -> its eigenvalues, descending, and their vectors as columns of [n, n]; cyclic Jacobi.
struct Eigen {
  std::vector<double> values, vectors;
};
Eigen eigen(std::vector<double> a, int64_t n) {
  constexpr int kSweeps = 30;  // a handful is enough
  std::vector<double> v(a.size(), 0.0);
  for (int64_t i = 0; i < n; ++i) v[static_cast<size_t>(i * n + i)] = 1;
  const auto turn = [n](std::vector<double>& m, int64_t i, int64_t step_i, int64_t j, double c, double s) {
    for (int64_t k = 0; k < n; ++k) {
      double &x = m[static_cast<size_t>(i + k * step_i)], &y = m[static_cast<size_t>(j + k * step_i)];
      const double old = x;
      x = c * old - s * y;
      y = s * old + c * y;
    }
  };
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    double off = 0, on = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) (i == j ? on : off) += std::pow(a[static_cast<size_t>(i * n + j)], 2);
    }
    if (off <= 1e-26 * on) break;
    for (int64_t p = 0; p + 1 < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        const double apq = a[static_cast<size_t>(p * n + q)];
        if (apq == 0) continue;
        // Square roots and not hypot, whose last bit differs between C libraries: theta * theta may be
        // infinite, then t is 0.
        const double theta =
            (a[static_cast<size_t>(q * n + q)] - a[static_cast<size_t>(p * n + p)]) / (2 * apq);
        const double t = std::copysign(1 / (std::abs(theta) + std::sqrt(theta * theta + 1)), theta);
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        turn(a, p, n, q, c, s);          // columns
        turn(a, p * n, 1, q * n, c, s);  // rows
        turn(v, p, n, q, c, s);
      }
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int64_t i, int64_t j) {
    return a[static_cast<size_t>(i * n + i)] > a[static_cast<size_t>(j * n + j)];
  });
  Eigen out{.values = {}, .vectors = std::vector<double>(v.size())};
  for (int64_t k = 0; k < n; ++k) {
    const int64_t from = order[static_cast<size_t>(k)];
    out.values.push_back(std::max(a[static_cast<size_t>(from * n + from)], 0.0));
    for (int64_t i = 0; i < n; ++i)
      out.vectors[static_cast<size_t>(i * n + k)] = v[static_cast<size_t>(i * n + from)];
  }
  return out;
}

// transpose(y) * y, its sums in order and in double.
std::vector<double> products(const Directions& y) {
  const int64_t width = y.width;
  std::vector<double> out(static_cast<size_t>(width * width), 0.0);
  for (int64_t i = 0; i < y.n; ++i) {
    const float* const row = y.row(i);
    for (int64_t p = 0; p < width; ++p) {
      for (int64_t q = 0; q <= p; ++q) out[static_cast<size_t>(p * width + q)] += double{row[p]} * row[q];
    }
  }
  for (int64_t p = 0; p < width; ++p) {
    for (int64_t q = 0; q < p; ++q)
      out[static_cast<size_t>(q * width + p)] = out[static_cast<size_t>(p * width + q)];
  }
  return out;
}

// y * turn [width, width].
void turn_by(Directions& y, const std::vector<double>& turn) {
  const int64_t width = y.width;
  std::vector<double> row(static_cast<size_t>(width));
  for (int64_t i = 0; i < y.n; ++i) {
    std::ranges::fill(row, 0.0);
    for (int64_t p = 0; p < width; ++p) {
      for (int64_t q = 0; q < width; ++q)
        row[static_cast<size_t>(q)] += y.row(i)[p] * turn[static_cast<size_t>(p * width + q)];
    }
    for (int64_t q = 0; q < width; ++q) y.row(i)[q] = static_cast<float>(row[static_cast<size_t>(q)]);
  }
}

// Replaced by an orthonormal basis of the same space: missing directions become 0. A second pass corrects the
// fp32 rounding of the first.
void make_orthonormal(Directions& y, int passes) {
  const int64_t width = y.width;
  for (int pass = 0; pass < passes; ++pass) {
    Eigen e = eigen(products(y), width);
    constexpr double kNothing = 1e-12;  // of the largest: below fp32's precision
    for (int64_t q = 0; q < width; ++q) {
      const double value = e.values[static_cast<size_t>(q)];
      const double factor = value > kNothing * e.values.front() ? 1 / std::sqrt(value) : 0;
      for (int64_t p = 0; p < width; ++p) e.vectors[static_cast<size_t>(p * width + q)] *= factor;
    }
    turn_by(y, e.vectors);
  }
}

Directions drawn(int64_t n, int64_t width, uint64_t seed) {
  Directions out(n, width);
  const uint64_t key = philox_key(seed, Purpose::kInit, 0, 0);
  for (size_t i = 0; i < out.values.size(); ++i)
    out.values[i] = static_cast<float>(philox_at(key, i, 2, 0)) / 2147483648.0F - 1.0F;
  return out;
}

}  // namespace

LowRank low_rank(std::span<const float> matrix, int64_t rows, int64_t columns, int64_t rank, uint64_t seed,
                 int threads) {
  LM_CHECK(std::ssize(matrix) == rows * columns && rank > 0, "shape of a matrix");
  const Matrix whole{matrix.data(), rows, columns};
  const int64_t width = (rank + kMore + kLanes - 1) / kLanes * kLanes;
  Directions right = drawn(columns, width, seed), left(rows, width);
  const bool avx2 = cpu_level() != CpuLevel::kBaseline;
  const auto multiply_rows = avx2 ? rows_of_product_avx2 : rows_of_product;
  const auto multiply_columns = avx2 ? columns_of_product_avx2 : columns_of_product;
  const auto forth = [&] {
    parallel_for(threads, rows, 16, [&](int64_t b, int64_t e) { multiply_rows(whole, right, left, b, e); });
  };
  const auto back = [&] {
    parallel_for(threads, (columns + kColumns - 1) / kColumns, 1, [&](int64_t b, int64_t e) {
      for (int64_t part = b; part < e; ++part)
        multiply_columns(whole, left, right, part * kColumns, std::min(columns, (part + 1) * kColumns));
    });
  };
  for (int i = 0; i < kIterations; ++i) {
    forth();
    make_orthonormal(left, 1);
    back();
    make_orthonormal(right, 1);
  }
  forth();
  make_orthonormal(left, 2);
  back();  // the matrix is now approximately left * transpose(right)
  const Eigen e = eigen(products(right), width);
  turn_by(left, e.vectors);
  turn_by(right, e.vectors);
  LowRank out{.left = std::vector<float>(static_cast<size_t>(rows * rank)),
              .right = std::vector<float>(static_cast<size_t>(rank * columns)),
              .strengths = {}};
  constexpr double kNothing = 1e-6;  // of the largest singular value
  for (int64_t k = 0; k < rank; ++k) {
    const double strength = std::sqrt(e.values[static_cast<size_t>(k)]);
    const bool there = strength > kNothing * std::sqrt(e.values.front());
    out.strengths.push_back(there ? strength : 0);
    if (!there) continue;
    const double root = std::sqrt(strength);
    for (int64_t i = 0; i < rows; ++i)
      out.left[static_cast<size_t>(i * rank + k)] = static_cast<float>(left.row(i)[k] * root);
    for (int64_t j = 0; j < columns; ++j)
      out.right[static_cast<size_t>(k * columns + j)] = static_cast<float>(right.row(j)[k] / root);
  }
  return out;
}

}  // namespace lm
