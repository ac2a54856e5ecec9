#include "weights/product_svd.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace lm {
namespace {

using Vector = std::vector<double>;
using Vectors = std::vector<Vector>;  // the columns of a matrix

double dot(const Vector& x, const Vector& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

void add(Vector& to, double factor, const Vector& x) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += factor * x[i];
}

// columns = basis * factor, `factor` upper triangular. A column that the ones before it span gets a basis
// vector of zeros.
struct Orthonormal {
  Vectors basis, factor;
};
Orthonormal orthonormal(Vectors columns) {
  constexpr double kSpanned = 1e-12;  // of the column's length: fp32 values differ by more
  Orthonormal out{.basis = {}, .factor = Vectors(columns.size(), Vector(columns.size(), 0.0))};
  for (size_t k = 0; k < columns.size(); ++k) {
    Vector& x = columns[k];
    const double before = std::sqrt(dot(x, x));
    for (int pass = 0; pass < 2; ++pass) {  // the second corrects the rounding of the first
      for (size_t j = 0; j < k; ++j) {
        const double along = dot(out.basis[j], x);
        out.factor[k][j] += along;
        add(x, -along, out.basis[j]);
      }
    }
    const double length = std::sqrt(dot(x, x));
    const bool spanned = length <= kSpanned * before;
    for (double& value : x) value = spanned ? 0 : value / length;
    out.factor[k][k] = spanned ? 0 : length;
    out.basis.push_back(std::move(x));
  }
  return out;
}

// Turns the columns of `core` until they are orthogonal, by one-sided Jacobi rotations, and those of `turned`
// with them.
void make_orthogonal(Vectors& core, Vectors& turned) {
  constexpr int kSweeps = 60;  // a dozen is enough
  constexpr double kOrthogonal = 1e-15;
  const auto turn = [](Vector& x, Vector& y, double c, double s) {
    for (size_t i = 0; i < x.size(); ++i) {
      const double old = x[i];
      x[i] = c * old - s * y[i];
      y[i] = s * old + c * y[i];
    }
  };
  bool turns = true;
  for (int sweep = 0; turns && sweep < kSweeps; ++sweep) {
    turns = false;
    for (size_t p = 0; p + 1 < core.size(); ++p) {
      for (size_t q = p + 1; q < core.size(); ++q) {
        const double pp = dot(core[p], core[p]), qq = dot(core[q], core[q]), pq = dot(core[p], core[q]);
        if (pp == 0 || qq == 0 || std::abs(pq) <= kOrthogonal * std::sqrt(pp) * std::sqrt(qq)) continue;
        turns = true;
        const double theta = (qq - pp) / (2 * pq);
        const double t = std::copysign(1 / (std::abs(theta) + std::sqrt(theta * theta + 1)), theta);
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        turn(core[p], core[q], c, s);
        turn(turned[p], turned[q], c, s);
      }
    }
  }
}

// basis * weights
Vector combined(const Vectors& basis, const Vector& weights) {
  Vector out(basis.front().size(), 0.0);
  for (size_t i = 0; i < basis.size(); ++i) add(out, weights[i], basis[i]);
  return out;
}

}  // namespace

ProductSvd product_svd(std::span<const float> left, std::span<const float> right, int64_t inner,
                       int64_t rank) {
  LM_CHECK(inner > 0 && rank > 0 && std::ssize(left) % inner == 0 && std::ssize(right) % inner == 0,
           "shapes of a product");
  const auto n = static_cast<size_t>(inner), most = static_cast<size_t>(rank);
  const size_t rows = left.size() / n, columns = right.size() / n;
  Vectors of_left(n, Vector(rows)), of_right;
  for (size_t i = 0; i < left.size(); ++i) of_left[i % n][i / n] = left[i];
  for (size_t k = 0; k < n; ++k)
    of_right.emplace_back(right.begin() + static_cast<std::ptrdiff_t>(k * columns),
                          right.begin() + static_cast<std::ptrdiff_t>((k + 1) * columns));
  const Orthonormal l = orthonormal(std::move(of_left)), r = orthonormal(std::move(of_right));
  // The product is l.basis * core * transpose(r.basis).
  Vectors core(n, Vector(n, 0.0)), turned(n, Vector(n, 0.0));
  for (size_t k = 0; k < n; ++k) {
    turned[k][k] = 1;
    for (size_t j = 0; j < n; ++j) add(core[j], r.factor[k][j], l.factor[k]);
  }
  make_orthogonal(core, turned);
  Vector strengths;
  for (const Vector& column : core) strengths.push_back(std::sqrt(dot(column, column)));
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t i, size_t j) { return strengths[i] > strengths[j]; });
  constexpr double kNothing = 1e-12;  // of the largest singular value
  ProductSvd out{.left = std::vector<float>(rows * most), .right = std::vector<float>(most * columns)};
  for (size_t k = 0; k < std::min(n, most); ++k) {
    if (strengths[order[k]] <= kNothing * strengths[order.front()]) break;
    const Vector u = combined(l.basis, core[order[k]]), v = combined(r.basis, turned[order[k]]);
    for (size_t i = 0; i < rows; ++i) out.left[i * most + k] = static_cast<float>(u[i]);
    for (size_t j = 0; j < columns; ++j) out.right[k * columns + j] = static_cast<float>(v[j]);
  }
  return out;
}

}  // namespace lm
