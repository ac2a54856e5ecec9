// What the kernel tests share: arrays of either element type seen as doubles, seeded random values, and a
// runner that asks every instruction set and several thread counts for the same bits.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu_features.h"
#include "kernels/kernels.h"

namespace lm {

// bf16 to nearest even, worked out in fp64 from the definition: 8 significant bits.
inline double nearest_bf16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));
  return std::nearbyint(x / unit) * unit;  // the default rounding mode is to nearest even
}

class Values {
 public:
  Values(DType dtype, int64_t n) : dtype_(dtype), bytes_(static_cast<size_t>(n) * dtype_size(dtype)) {}
  static Values random(DType dtype, int64_t n, uint32_t seed, double scale = 1) {
    Values values(dtype, n);
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal(0, scale);
    for (int64_t i = 0; i < n; ++i) values.set(i, normal(engine));
    return values;
  }
  int64_t size() const { return static_cast<int64_t>(bytes_.size() / dtype_size(dtype_)); }
  DType dtype() const { return dtype_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  double operator[](int64_t i) const {
    float value = 0;
    if (dtype_ == DType::kF32) {
      std::memcpy(&value, bytes_.data() + i * 4, 4);
    } else {
      uint16_t high = 0;
      std::memcpy(&high, bytes_.data() + i * 2, 2);
      const uint32_t bits = static_cast<uint32_t>(high) << 16;
      std::memcpy(&value, &bits, 4);
    }
    return value;
  }
  void set(int64_t i, double x) {
    const float value = static_cast<float>(dtype_ == DType::kF32 ? x : nearest_bf16(x));
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (dtype_ == DType::kF32) {
      std::memcpy(bytes_.data() + i * 4, &bits, 4);
    } else {
      const uint16_t high = static_cast<uint16_t>(bits >> 16);
      std::memcpy(bytes_.data() + i * 2, &high, 2);
    }
  }
  // What storing x in this array's type gives.
  double rounded(double x) const { return dtype_ == DType::kF32 ? x : nearest_bf16(x); }
  bool operator==(const Values& other) const { return dtype_ == other.dtype_ && bytes_ == other.bytes_; }

 private:
  DType dtype_;
  std::vector<uint8_t> bytes_;
};

inline std::vector<CpuLevel> cpu_levels() {
  std::vector<CpuLevel> levels;
  for (int l = 0; l <= static_cast<int>(cpu_level()); ++l) levels.push_back(static_cast<CpuLevel>(l));
  return levels;
}

// |got - want| within a relative and an absolute bound. The first few differences are printed.
inline void expect_near(const Values& got, const std::vector<double>& want, double relative, double absolute,
                        const std::string& what) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(want.size())) << what;
  int shown = 0;
  for (int64_t i = 0; i < got.size() && shown < 5; ++i) {
    const double expected = want[static_cast<size_t>(i)];
    const bool near = std::abs(got[i] - expected) <= relative * std::abs(expected) + absolute;
    if (near || got[i] == expected || (std::isnan(got[i]) && std::isnan(expected))) continue;
    ADD_FAILURE() << what << "[" << i << "] = " << got[i] << ", reference " << expected;
    ++shown;
  }
}
// One unit in the last place of bf16 is 2^-8 relative at most 2^-7; fp32 results carry some rounding steps.
inline double relative_bound(DType dtype) {
  return dtype == DType::kBF16 ? 1.0 / 128 : 4e-6;
}
inline double absolute_bound(DType dtype) {
  return dtype == DType::kBF16 ? 1e-5 : 2e-6;
}

inline std::string dtype_text(DType dtype) {
  return dtype_name(dtype);
}

// Runs `body` (which returns every output) with each instruction set on 1, 2 and 3 threads; all must give the
// same bits. With kExp the baseline, whose exp has no fma, need only be near. Returns the bits of the highest
// level.
enum class Bits { kSame, kExp };
using Outputs = std::vector<Values>;
inline Outputs same_everywhere(const std::function<Outputs(const Kernels&, StreamView)>& body,
                               Bits bits = Bits::kSame) {
  const Outputs first = body(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1});
  for (CpuLevel level : cpu_levels()) {
    Outputs of_level;
    for (int threads : {1, 2, 3}) {
      Outputs outputs = body(cpu_kernels(level), {DeviceType::kCpu, nullptr, threads});
      const bool exact = bits == Bits::kSame || level != CpuLevel::kBaseline;
      const Outputs& want = exact ? first : of_level;
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(outputs[i] == want[i]) << "output " << i << " of " << cpu_level_name(level) << " on "
                                           << threads << " threads has other bits";
      }
      of_level = std::move(outputs);
    }
    for (size_t i = 0; i < first.size(); ++i) {
      std::vector<double> want;
      for (int64_t k = 0; k < first[i].size(); ++k) want.push_back(first[i][k]);
      if (bits == Bits::kExp) {
        expect_near(of_level[i], want, 2 * relative_bound(first[i].dtype()), 1e-5, cpu_level_name(level));
      }
    }
  }
  return first;
}

}  // namespace lm
