// What the emulator's ATen operations share: the stream, the memory as the CPU sees it, what the order
// checker is told.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

#include "emulator.h"

namespace emulator {

inline cudaStream_t current() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

// The same memory as the CPU sees it; only stream threads may follow it.
inline at::Tensor seen(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return at::from_blob(emulator::inside(t.data_ptr()), t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.scalar_type()));
}

// Rows of the last dimension, or all of it at once.
inline void add_access(std::vector<Access>& out, const at::Tensor& t, bool write) {
  if (!t.defined() || !t.is_cuda() || t.numel() == 0) return;
  const auto size = static_cast<int64_t>(t.element_size());
  if (t.is_non_overlapping_and_dense()) return out.push_back({t.data_ptr(), t.numel() * size, write});
  const int64_t last = t.dim() - 1;
  const bool packed = t.stride(last) == 1;
  std::vector<int64_t> index(static_cast<size_t>(t.dim()), 0);
  const int64_t steps = packed ? t.numel() / t.size(last) : t.numel();
  for (int64_t i = 0; i < steps; ++i) {
    int64_t offset = 0, rest = i;
    for (int64_t d = packed ? last - 1 : last; d >= 0; --d) {
      offset += rest % t.size(d) * t.stride(d);
      rest /= t.size(d);
    }
    out.push_back(
        {static_cast<char*>(t.data_ptr()) + offset * size, (packed ? t.size(last) : 1) * size, write});
  }
}

}  // namespace emulator
