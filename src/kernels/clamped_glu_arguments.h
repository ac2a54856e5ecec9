// The arguments of the clamped GLU's kernels (kernels.h has those of the others, and the rules for all of
// them): h = (u + 1) g sigmoid(alpha g) of g = min(gate, limit) and u = up, limited to [-limit, limit].
// Gate and up of column i are neighbours, 2i and 2i + 1.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace lm {

struct ClampedGluForward {
  const void* gate_up = nullptr;  // [rows, 2F]
  void* out = nullptr;            // [rows, F]
  int64_t rows = 0, ffn = 0;
  float alpha = 1, limit = 1;
  DType dtype = DType::kF32;
};

// What is limited has no gradient where it is beyond the limit; at it, it has one. h is computed again, bit
// for bit.
struct ClampedGluBackward {
  void* gate_up = nullptr;  // [rows, 2F]: in gate and up, out their gradients
  void* dh = nullptr;       // [rows, F]: in dh, out h
  int64_t rows = 0, ffn = 0;
  float alpha = 1, limit = 1;
  DType dtype = DType::kF32;
};

}  // namespace lm
