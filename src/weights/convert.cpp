#include "weights/convert.h"

#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/host_device.h"

namespace lm {
namespace {

template <class From, class To, class Convert>
void loop(const std::byte* from, std::byte* to, int64_t n, Convert convert) {
  for (int64_t i = 0; i < n; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    const To out = convert(value);
    std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &out, sizeof(To));
  }
}

}  // namespace

void convert_elements(const std::byte* from, DType from_type, std::byte* to, DType to_type,
                      int64_t elements) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(elements) * dtype_size(to_type));
  } else if (from_type == DType::kF32 && to_type == DType::kBF16) {
    loop<float, Bf16>(from, to, elements, [](float x) { return to_bf16(x); });
  } else if (from_type == DType::kBF16 && to_type == DType::kF32) {
    loop<Bf16, float>(from, to, elements, [](Bf16 x) { return to_float(x); });
  } else if (from_type == DType::kF16 && to_type == DType::kF32) {
    loop<Fp16, float>(from, to, elements, [](Fp16 x) { return to_float(x); });
  } else if (from_type == DType::kF16 && to_type == DType::kBF16) {
    loop<Fp16, Bf16>(from, to, elements, [](Fp16 x) { return to_bf16(to_float(x)); });
  } else if (from_type == DType::kF32 && to_type == DType::kF16) {
    loop<float, Fp16>(from, to, elements, [](float x) { return to_fp16(x); });
  } else if (from_type == DType::kBF16 && to_type == DType::kF16) {
    loop<Bf16, Fp16>(from, to, elements, [](Bf16 x) { return to_fp16(to_float(x)); });
  } else {
    fail_check("convertible types", __FILE__, __LINE__,
               std::string(dtype_name(from_type)) + " -> " + dtype_name(to_type));
  }
}

void settle_ties(std::span<float> masters) {
  for (float& master : masters) {
    const uint32_t bits = std::bit_cast<uint32_t>(master);
    if ((bits & 0xFFFFu) == 0x8000u) master = std::bit_cast<float>(bits | 1u);
  }
}

}  // namespace lm
