// Loops over OpenMP threads, shared with ATen's own pool (one libgomp in the process).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace lm {

// Calls body(begin, end) on contiguous ranges that cover [0, n); at most `threads` of them, each at least
// `grain` long but the last. The result must not depend on which thread runs a range.
template <class Body>
void parallel_for(int threads, int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  const int64_t parts = std::min<int64_t>(threads, (n + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) {
    body(int64_t{0}, n);
    return;
  }
  const int64_t size = (n + parts - 1) / parts;
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * size, end = std::min(n, begin + size);
    if (begin < end) body(begin, end);
  }
}

}  // namespace lm
