// Element types of tensors and files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lm {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64, kI64, kI32, kI16, kI8, kU8, kBool };

constexpr size_t dtype_size(DType type) {
  switch (type) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16:
      return 2;
    default:
      return 1;
  }
}

// "fp32", "bf16", ...: the spelling of our config and plan.
constexpr const char* dtype_name(DType type) {
  constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "fp64", "i64", "i32", "i16", "i8", "u8", "bool"};
  return kNames[static_cast<size_t>(type)];
}

enum class DeviceType : uint8_t { kCpu, kCuda };

}  // namespace lm
