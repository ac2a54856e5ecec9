// What the kernel tests share: arrays of any element type seen as doubles, seeded random values, and a
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

// The same of fp16: 11 significant bits, down to 2^-24, infinity from 65520 on.
inline double nearest_fp16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 11, -24));
  const double near = std::nearbyint(x / unit) * unit;
  return std::abs(near) > 65504 ? std::copysign(HUGE_VAL, x) : near;
}
inline double nearest_of(DType dtype, double x) {
  return dtype == DType::kF32 ? x : dtype == DType::kF16 ? nearest_fp16(x) : nearest_bf16(x);
}
// The number that fp16 bits stand for, and the bits of one that they hold exactly.
inline double fp16_number(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction == 0 ? HUGE_VAL : std::nan(""))
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}
inline uint16_t fp16_bits(double x) {
  if (std::isnan(x)) return 0x7E00;
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const double size = std::abs(x);
  if (std::isinf(x)) return sign | 0x7C00;
  if (size < std::ldexp(1.0, -14))
    return static_cast<uint16_t>(sign | static_cast<int>(std::ldexp(size, 24)));
  int exponent = 0;
  const double half = std::frexp(size, &exponent);
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | static_cast<int>((2 * half - 1) * 1024));
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
      if (dtype_ == DType::kF16) return fp16_number(high);
      const uint32_t bits = static_cast<uint32_t>(high) << 16;
      std::memcpy(&value, &bits, 4);
    }
    return value;
  }
  void set(int64_t i, double x) {
    if (dtype_ == DType::kF16) {
      const uint16_t half = fp16_bits(nearest_fp16(x));
      std::memcpy(bytes_.data() + i * 2, &half, 2);
      return;
    }
    const float value = static_cast<float>(nearest_of(dtype_, x));
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
  double rounded(double x) const { return nearest_of(dtype_, x); }
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
