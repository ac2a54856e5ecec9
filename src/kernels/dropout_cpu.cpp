// Dropout on the CPU: one call of Philox per lane gives the numbers of 64 features.
#include "kernels/cpu_launchers.h"
#include "kernels/dropout_formula.h"

namespace lm::LM_ISA {
namespace {

struct DropoutRule {
  uint64_t key;
  U32 threshold;
  F32 scale;
};

template <class T>
void dropout_row(const Dropout& a, const DropoutRule& rule, int64_t r) {
  const T* x = static_cast<const T*>(a.x) + r * a.width;
  T* out = static_cast<T*>(a.out) + r * a.width;
  const U32 position(static_cast<uint32_t>(a.position[r])), sample(static_cast<uint32_t>(a.sample[r]));
  for (int64_t first = 0; first < a.width; first += 64) {
    const U32 call = lane_numbers() + U32(static_cast<uint32_t>(first / 4));
    const PhiloxWords<U32> numbers = philox<U32>(rule.key, call, U32(0), position, sample);
    for (int w = 0; w < 4 && first + w * kLanes < a.width; ++w) {
      const int64_t j = first + w * kLanes;
      const F32 zero(0.f);
      const auto apply = [&](auto count) LM_BODY {
        F32 v = load(x + j, count) * rule.scale;
        v = select_less(numbers.word[w] >> 8, rule.threshold, zero, v);
        store(out + j, a.accumulate ? load(out + j, count) + v : v, count);
      };
      if (j + kLanes <= a.width) {
        apply(Whole{});
      } else {
        apply(Part{static_cast<int>(a.width - j)});
      }
    }
  }
}

}  // namespace

void dropout(const Dropout& a, StreamView stream) {
  const DropoutRule rule{a.key, U32(dropout_threshold(a.p)), F32(dropout_scale(a.p))};
  with_dtype("dropout", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) dropout_row<decltype(t)>(a, rule, r);
    });
  });
}

}  // namespace lm::LM_ISA
