#include "weights/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"

namespace lm {
namespace {

// fp16 by its definition, in fp64.
double fp16_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const double sign = h >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

// The nearest bf16 to a value, ties to even, by comparing its two neighbours in fp64.
uint16_t nearest_bf16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t low = static_cast<uint16_t>(bits >> 16), high = static_cast<uint16_t>(low + 1);
  if (std::isinf(value)) return low;
  auto real = [](uint16_t h) {
    // The step above the largest finite number counts as its continuation, 2^128.
    if ((h & 0x7FFF) == 0x7F80) return (h >> 15 ? -1 : 1) * std::ldexp(1.0, 128);
    return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(h) << 16));
  };
  const double below = std::abs(static_cast<double>(value) - real(low));
  const double above = std::abs(static_cast<double>(value) - real(high));
  if (below != above) return below < above ? low : high;
  return low % 2 == 0 ? low : high;
}

template <class From, class To>
std::vector<To> convert(const std::vector<From>& from, DType from_type, DType to_type) {
  std::vector<To> to(from.size());
  convert_elements(reinterpret_cast<const std::byte*>(from.data()), from_type,
                   reinterpret_cast<std::byte*>(to.data()), to_type, static_cast<int64_t>(from.size()));
  return to;
}

std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

TEST(Convert, EveryFp16BecomesItsExactFp32) {
  const auto out = convert<uint16_t, float>(all_halves(), DType::kF16, DType::kF32);
  for (size_t i = 0; i < out.size(); ++i) {
    const double expected = fp16_value(static_cast<uint16_t>(i));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_EQ(static_cast<double>(out[i]), expected) << i;
      EXPECT_EQ(std::signbit(out[i]), i >= 32768) << i;
    }
  }
}

TEST(Convert, EveryBf16SurvivesTheWayThroughFp32) {
  const auto wide = convert<uint16_t, float>(all_halves(), DType::kBF16, DType::kF32);
  const auto back = convert<float, uint16_t>(wide, DType::kF32, DType::kBF16);
  for (size_t i = 0; i < back.size(); ++i) EXPECT_EQ(back[i], std::isnan(wide[i]) ? 0x7FC0 : i);
}

TEST(Convert, Fp32IsRoundedToTheNearestBf16TiesToEven) {
  std::vector<float> values;
  uint32_t state = 12345;
  for (int i = 0; i < 200000; ++i) {
    state = state * 1664525u + 1013904223u;
    values.push_back(std::bit_cast<float>(state));
    values.push_back(std::bit_cast<float>((state & 0xFFFF0000u) | 0x8000u));  // a tie
  }
  for (const uint32_t bits : {0x7F7FFFFFu, 0xFF7FFFFFu, 0x7F800000u, 0x7F800001u, 0xFFFFFFFFu, 0u,
                              0x80000000u, 1u, 0x7F7F8000u, 0x7F7F7FFFu}) {
    values.push_back(std::bit_cast<float>(bits));
  }
  const auto out = convert<float, uint16_t>(values, DType::kF32, DType::kBF16);
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], nearest_bf16(values[i])) << values[i];
}

TEST(Convert, Fp16GoesToBf16WithOneRounding) {
  const auto out = convert<uint16_t, uint16_t>(all_halves(), DType::kF16, DType::kBF16);
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(out[i], nearest_bf16(static_cast<float>(fp16_value(static_cast<uint16_t>(i))))) << i;
  }
}

TEST(Convert, OtherTypesAreAnError) {
  std::byte bytes[8]{};
  EXPECT_THROW(convert_elements(bytes, DType::kI8, bytes + 4, DType::kF32, 1), Error);
  EXPECT_THROW(convert_elements(bytes, DType::kF32, bytes + 4, DType::kI8, 1), Error);
}

TEST(SettleTies, MakesRoundingGiveTheWeightsThatWereTrained) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    if ((high & 0x7F80u) == 0x7F80u) continue;  // infinities and numbers that are none have no low half
    for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const uint32_t master = high << 16 | low;
      float settled = std::bit_cast<float>(master);
      settle_ties({&settled, 1});
      uint16_t rounded = 0;
      convert_elements(reinterpret_cast<const std::byte*>(&settled), DType::kF32,
                       reinterpret_cast<std::byte*>(&rounded), DType::kBF16, 1);
      ASSERT_EQ(rounded, static_cast<uint16_t>((master + 0x8000u) >> 16)) << std::hex << master;
      ASSERT_LE(std::bit_cast<uint32_t>(settled) - master, 1U);
    }
  }
}

}  // namespace
}  // namespace lm
