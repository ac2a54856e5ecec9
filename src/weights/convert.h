// Element conversion between the floating types that weights are stored in. To bf16 it rounds to nearest,
// ties to even, and every NaN becomes 0x7FC0, as the reference does when it loads a model in another type.
// Pure; the caller owns the memory, which must not overlap; alignment to the element is not needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace lm {

// fp32, bf16 or fp16 -> one of them; equal types are copied. Anything else is Error(70).
void convert_elements(const std::byte* from, DType from_type, std::byte* to, DType to_type, int64_t elements);

// Adjusts fp32 masters so that rounding them to bf16 as above gives the trained weights, (bits + 0x8000) >>
// 16 (MasterForm in optim/rules/rule.h), which rounds ties up. A tie becomes the next number away from zero,
// one unit in fp32's last place.
void settle_ties(std::span<float> masters);

constexpr bool is_weight_type(DType type) {
  return type == DType::kF32 || type == DType::kBF16 || type == DType::kF16;
}

}  // namespace lm
