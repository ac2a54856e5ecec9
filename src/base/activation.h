// The activation functions of MLPs (and of P-tuning's encoder), as their kernels compute them
// (kernels/block_formula.h).
#pragma once

#include <cstdint>

namespace lm {

enum class Activation : uint8_t {
  kSilu,      // x * sigmoid(x)
  kGeluTanh,  // x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
  kRelu2,     // max(x, 0)^2
  kRelu,      // max(x, 0)
};

}  // namespace lm
