// Rows by index on the CPU: the embedding's gather and the two halves of its gradient.
#include <cstring>

#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class T>
void gather_scaled(const GatherRows& a, int64_t begin, int64_t end) {
  const F32 scale(a.scale);
  const bool add = a.add;
  for (int64_t r = begin; r < end; ++r) {
    const T* from = static_cast<const T*>(a.table) + a.index[r] * a.width;
    T* out = static_cast<T*>(a.out) + r * a.width;
    each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
      F32 row = round_as<T>(load(from + j, count) * scale);
      if (add) row = load(out + j, count) + row;
      store(out + j, row, count);
    });
  }
}

}  // namespace

void gather_rows(const GatherRows& a, StreamView stream) {
  if (a.scale != 1 || a.add) {
    return with_dtype("gather_rows", a.dtype, [&](auto t) {
      parallel_for(stream.threads, a.rows, row_grain(a.width),
                   [&](int64_t begin, int64_t end) { gather_scaled<decltype(t)>(a, begin, end); });
    });
  }
  const size_t bytes = static_cast<size_t>(a.width) * dtype_size(a.dtype);
  parallel_for(stream.threads, a.rows, row_grain(a.width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      memcpy(static_cast<char*>(a.out) + static_cast<size_t>(r) * bytes,
             static_cast<const char*>(a.table) + static_cast<size_t>(a.index[r]) * bytes, bytes);
    }
  });
}

void scatter_rows(const ScatterRows& a, StreamView stream) {
  const size_t bytes = static_cast<size_t>(a.width) * dtype_size(a.dtype);
  auto* const out = static_cast<char*>(a.out);
  parallel_for(stream.threads, a.out_rows, row_grain(a.width), [&](int64_t begin, int64_t end) {
    const int32_t* next = std::lower_bound(a.index, a.index + a.rows, begin);
    for (int64_t r = begin; r < end; ++r) {
      char* const row = out + static_cast<size_t>(r) * bytes;
      if (next < a.index + a.rows && *next == r) {
        memcpy(row, static_cast<const char*>(a.source) + static_cast<size_t>(next - a.index) * bytes, bytes);
        ++next;
      } else {
        memset(row, 0, bytes);
      }
    }
  });
}

void sum_rows(const SumRows& a, StreamView stream) {
  with_dtype("sum_rows", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.slots, row_grain(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        float* sums = a.sums + s * a.width;
        for (int32_t k = a.start[s]; k < a.start[s + 1]; ++k) {
          const T* row = static_cast<const T*>(a.source) + a.order[k] * a.width;
          each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
            store(sums + j, load(sums + j, count) + load(row + j, count), count);
          });
        }
      }
    });
  });
}

void take_first_rows(const TakeFirstRows& a, StreamView stream) {
  with_dtype("take_first_rows", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.rows, row_grain(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* const sums = a.sums + i * a.width;
        for (int64_t d = 0; d < a.documents; ++d) {
          if (i >= a.start[d + 1] - a.start[d]) continue;
          T* const row = static_cast<T*>(a.x) + (a.first + a.start[d] + i) * a.stride;
          each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
            store(sums + j, load(sums + j, count) + load(row + j, count), count);
            store(row + j, F32(0.f), count);
          });
        }
      }
    });
  });
}

void add_rows(const AddRows& a, StreamView stream) {
  with_dtype("add_rows", a.gradient_dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.slots, row_grain(a.width), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const float* sums = a.sums + s * a.width;
        T* row = static_cast<T*>(a.gradient) + a.row[s] * a.width;
        const F32 scale(a.scale);
        each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
          store(row + j, load(row + j, count) + load(sums + j, count) * scale, count);
        });
      }
    });
  });
}

}  // namespace lm::LM_ISA
