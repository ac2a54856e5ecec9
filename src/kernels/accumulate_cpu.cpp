// Sums over arrays and rows on the CPU.
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class To, class From>
void accumulate_range(const Accumulate& a, int64_t begin, int64_t end) {
  To* to = static_cast<To*>(a.to) + begin;
  const From* from = static_cast<const From*>(a.from) + begin;
  if (a.overwrite) {
    each_vector(end - begin,
                [&](int64_t i, auto count) LM_BODY { store(to + i, load(from + i, count), count); });
  } else {
    each_vector(end - begin, [&](int64_t i, auto count) LM_BODY {
      store(to + i, load(to + i, count) + load(from + i, count), count);
    });
  }
}

template <class T>
void sum_block(const SumColumns& a, int64_t block) {
  float* sums = a.partial + block * a.width;
  const int64_t first = block * kRowBlock, end = std::min(a.rows, first + kRowBlock);
  std::fill_n(sums, a.width, 0.f);
  for (int64_t r = first; r < end; ++r) {
    const T* row = static_cast<const T*>(a.x) + r * a.stride;
    each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
      store(sums + j, load(sums + j, count) + load(row + j, count), count);
    });
  }
}

}  // namespace

void accumulate(const Accumulate& a, StreamView stream) {
  with_dtype("accumulate", a.to_dtype, [&](auto to) {
    with_dtype("accumulate", a.from_dtype, [&](auto from) {
      parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
        accumulate_range<decltype(to), decltype(from)>(a, begin, end);
      });
    });
  });
}

void sum_columns(const SumColumns& a, StreamView stream) {
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  with_dtype("sum_columns", a.dtype, [&](auto t) {
    parallel_for(stream.threads, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) sum_block<decltype(t)>(a, b);
    });
  });
  if (blocks == 0) return std::fill_n(a.sums, a.width, 0.f), void();
  sum_partials(a.partial, blocks, a.width, a.sums);
}

void add_bias(const AddBias& a, StreamView stream) {
  with_dtype("add_bias", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.rows, row_grain(a.width), [&](int64_t begin, int64_t end) {
      const T* bias = static_cast<const T*>(a.bias);
      for (int64_t r = begin; r < end; ++r) {
        T* x = static_cast<T*>(a.x) + r * a.stride;
        each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
          store(x + j, load(x + j, count) + load(bias + j, count), count);
        });
      }
    });
  });
}

}  // namespace lm::LM_ISA
