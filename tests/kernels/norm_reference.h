// Norms written as scalars in fp32, one operation after the other, rounded where each form rounds: with the
// rstd that a kernel has found, its output and its sums over rows have these bits.
#pragma once

#include <vector>

#include "tests/kernels/support.h"

namespace lm {

// What stands behind the normalised input of an RMSNorm.
struct RmsForm {
  WeightForm form = WeightForm::kAfterRounding;
  bool weighted = true;
  bool added = false;
  float factor = 1;
};

inline const RmsForm kRmsForms[] = {{},
                                    {.form = WeightForm::kBeforeRounding},
                                    {.form = WeightForm::kOffset},
                                    {.weighted = false},
                                    {.added = true},
                                    {.form = WeightForm::kBeforeRounding, .added = true, .factor = 0.3f},
                                    {.form = WeightForm::kOffset, .added = true, .factor = -0.5f},
                                    {.weighted = false, .added = true, .factor = 0.7f}};

inline std::string form_text(const RmsForm& f) {
  return "form " + std::to_string(static_cast<int>(f.form)) + (f.weighted ? "" : ", no weight") +
         (f.added ? ", added " + std::to_string(f.factor) : "");
}

inline float as_stored(DType dtype, float x) {
  return dtype == DType::kF32 ? x : static_cast<float>(nearest_bf16(x));
}

// Of n = x * rstd.
inline float rms_output(const RmsForm& f, DType dtype, float n, float weight, float add_to) {
  float y = n;
  if (f.weighted) {
    switch (f.form) {
      case WeightForm::kAfterRounding:
        y = weight * as_stored(dtype, n);
        break;
      case WeightForm::kBeforeRounding:
        y = weight * n;
        break;
      case WeightForm::kOffset:
        y = (1 + weight) * n;
        break;
    }
  }
  y = as_stored(dtype, y);
  return f.added ? add_to + as_stored(dtype, f.factor * y) : y;
}
// The normalised input as the weight's gradient has it.
inline float rms_input(const RmsForm& f, DType dtype, float n) {
  return f.weighted && f.form == WeightForm::kAfterRounding ? as_stored(dtype, n) : n;
}

// The sum of `term(r)` over rows: kRowBlock of them in order, then those sums in order.
template <class Term>
float sum_of_rows(int64_t rows, const Term& term) {
  float sum = 0;
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    float block = 0;
    for (int64_t r = begin; r < std::min(rows, begin + kRowBlock); ++r) block += term(r);
    sum = begin == 0 ? block : sum + block;
  }
  return sum;
}

// The order of a sum over a row on the CPU: element j goes to lane j mod 16, then lanes are added by a tree.
inline float sum_of_lanes(const std::vector<float>& x) {
  float lane[16] = {};
  for (size_t j = 0; j < x.size(); ++j) lane[j % 16] += x[j];
  for (size_t step = 8; step > 0; step /= 2) {
    for (size_t l = 0; l < step; ++l) lane[l] += lane[l + step];
  }
  return lane[0];
}

}  // namespace lm
