// The singular value decomposition of a product of two thin matrices, exact to the rounding of its fp32
// result, without forming the product. Torch-free, computed in double by one thread; the caller owns the
// memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lm {

// left [rows, rank] * right [rank, columns], row-major: column i of `left` is singular vector i times its
// singular value, row i of `right` has the length 1. Singular values descend; what is beyond the product's
// rank is 0.
struct ProductSvd {
  std::vector<float> left, right;
};

// The best approximation of that rank of left [rows, inner] * right [inner, columns].
// About 4 * inner² * (rows + columns) operations, and inner³ for each sweep over the core.
ProductSvd product_svd(std::span<const float> left, std::span<const float> right, int64_t inner,
                       int64_t rank);

}  // namespace lm
