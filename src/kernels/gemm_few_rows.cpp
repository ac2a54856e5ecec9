#include "kernels/gemm_few_rows.h"

#include "base/processor.h"

namespace lm {
namespace {

constexpr int64_t kLeastRows = 16, kLeastSize = 128;  // below them nothing was measured
constexpr int64_t kColumns = 32;                      // that a row of the large matrix must be a multiple of

bool few(int64_t rows) {
  return rows >= kLeastRows && rows <= kFewRows;
}

}  // namespace

bool multiplies_few_rows(const Gemm& g) {
#if defined(__x86_64__)
  if (best_instructions() != Instructions::kAvx512Bf16) return false;
#else
  return false;
#endif
  const auto bf16 = [](const View& x) { return x.dtype == DType::kBF16; };
  if (!bf16(g.a) || !bf16(g.b) || !bf16(g.out) || (g.addend.defined() && !bf16(g.addend))) return false;
  const bool whole = g.out.columns % kColumns == 0;
  if (g.transpose_a)
    return !g.transpose_b && few(g.a.rows) && g.out.rows >= kLeastSize && g.out.columns >= kLeastSize &&
           whole;
  return few(g.a.rows) && g.a.columns >= kLeastSize && g.a.columns % 2 == 0 && g.out.columns >= kLeastSize &&
         (g.transpose_b || whole);
}

}  // namespace lm
