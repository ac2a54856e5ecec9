// Granule norms: the documented order written plainly, bit for bit on every instruction set.
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kSize = 4096;

// `Values` holds fp32, so the fp64 sums travel as pairs of 32-bit patterns.
Values bits_of_sums(const std::vector<double>& sums) {
  Values values(DType::kF32, static_cast<int64_t>(sums.size()) * 2);
  std::memcpy(values.data(), sums.data(), sums.size() * sizeof(double));
  return values;
}

std::vector<double> reference(const Values& x) {
  std::vector<double> sums;
  for (int64_t g = 0; g < x.size() / kSize; ++g) {
    double lane[64] = {};
    for (int64_t i = 0; i < kSize; ++i) lane[i % 64] += x[g * kSize + i] * x[g * kSize + i];
    for (int step = 32; step > 0; step /= 2) {
      for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
    }
    const uint64_t nan_bits = 0x7FF8000000000000u;
    if (std::isnan(lane[0])) std::memcpy(&lane[0], &nan_bits, 8);
    sums.push_back(lane[0]);
  }
  return sums;
}

Outputs run(const Values& x) {
  return same_everywhere([&](const Kernels& k, StreamView stream) {
    std::vector<double> sums(static_cast<size_t>(x.size() / kSize));
    k.granule_norms({.x = x.data(), .sums = sums.data(), .granules = x.size() / kSize, .dtype = x.dtype()},
                    stream);
    return Outputs{bits_of_sums(sums)};
  });
}

TEST(GranuleNorms, AddInTheDocumentedOrderBitForBit) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (double scale : {1.0, 1e-30, 1e18, 1e-41}) {
      const Values x = Values::random(dtype, 11 * kSize, 41, scale);
      EXPECT_TRUE(run(x)[0] == bits_of_sums(reference(x))) << dtype_text(dtype) << " scale " << scale;
    }
  }
}

TEST(GranuleNorms, ShowNanAndInfinityInTheirGranuleAlone) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Values x = Values::random(dtype, 4 * kSize, 42);
    x.set(5, std::nan(""));
    x.set(kSize + 77, INFINITY);
    x.set(2 * kSize + 4095, -INFINITY);
    x.set(2 * kSize + 1, std::nan("7"));
    const std::vector<double> want = reference(x);
    EXPECT_TRUE(std::isnan(want[0]) && std::isinf(want[1]) && std::isnan(want[2]) && std::isfinite(want[3]));
    EXPECT_TRUE(run(x)[0] == bits_of_sums(want)) << dtype_text(dtype);
  }
}

}  // namespace
}  // namespace lm
