// What simulated units compute, whoever walks them.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "mixed.h"

namespace lm::test {

inline constexpr double kMostNorm = 2;
inline constexpr float kRate = 0.125F;

inline float first_weight(int64_t unit, int64_t element) {
  return 1 + 0.125F * static_cast<float>(unit) + 0x1p-10F * static_cast<float>(element);
}
inline uint64_t tokens_of(uint64_t seed, int64_t step, int rank, int64_t micro) {
  return mixed(mixed(mixed(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(rank * 64 + micro));
}
// Behind a unit, of its input and its weights' bits.
inline uint64_t behind(uint64_t input, uint64_t weights) {
  return mixed(input ^ weights);
}
// Of a mixture with as many experts as ranks: the rows that each has of this input, one behind another, and
// where each one's begin; what an expert makes of a row; and what all have made of the rows together.
struct RoutedRows {
  std::vector<uint64_t> rows;
  std::vector<int32_t> start;  // [E + 1]
};
inline RoutedRows routed_rows(uint64_t input, int experts) {
  RoutedRows out{.rows = {}, .start = {0}};
  for (int e = 0; e < experts; ++e) {
    for (uint64_t left = mixed(input ^ static_cast<uint64_t>(e)) % 4; left > 0; --left)
      out.rows.push_back(mixed(input + static_cast<uint64_t>(e) * 4 + left));
    out.start.push_back(static_cast<int32_t>(out.rows.size()));
  }
  return out;
}
inline uint64_t by_expert(uint64_t row, int64_t unit, int64_t expert) {
  return mixed(row ^ static_cast<uint64_t>(unit * 4096 + expert));
}
inline uint64_t combined(std::span<const uint64_t> rows) {
  uint64_t out = 0;
  for (const uint64_t row : rows) out = mixed(out ^ row);
  return out;
}
inline double loss_of(uint64_t output) {
  return static_cast<double>(output >> 40) * 0x1p-24;
}
inline float gradient_of(uint64_t input, uint64_t back, float weight, int64_t element) {
  const uint64_t drawn = mixed(input ^ (back + static_cast<uint64_t>(element)));
  return static_cast<float>(drawn >> 40) * 0x1p-24F - 0.5F + 0.0625F * weight;
}
inline double square_of(std::span<const float> gradient) {
  double sum = 0;
  for (const float one : gradient) sum += double{one} * one;
  return sum;
}
inline float scale_for(double square) {
  const double norm = std::sqrt(square);
  return norm > kMostNorm ? static_cast<float>(kMostNorm / norm) : 1.0F;
}
inline float updated(float weight, float gradient, float scale) {
  return weight * 0.984375F - kRate * (scale * gradient);
}

}  // namespace lm::test
