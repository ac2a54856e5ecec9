#include "weights/initialise.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/philox.h"

namespace lm {
namespace {

constexpr double kStddev = 0.02;  // initializer_range of the families we train

void store(DType dtype, std::byte* memory, int64_t index, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(memory + index * 4, &value, 4);
    return;
  }
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto rounded = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  std::memcpy(memory + index * 2, &rounded, 2);
}

// In (0, 1]: never 0, so that its logarithm exists.
double unit(uint32_t word) {
  return (static_cast<double>(word) + 1.0) / 4294967296.0;
}

}  // namespace

void initialise(const Parameter& parameter, uint64_t seed, uint32_t tensor, DType dtype, std::byte* memory,
                int64_t first_row, int64_t rows) {
  const uint64_t key = philox_key(seed, Purpose::kInit, 0, tensor);
  const int64_t begin = first_row * parameter.columns, end = begin + rows * parameter.columns;
  const double bound = 1.0 / std::sqrt(static_cast<double>(parameter.columns));
  for (int64_t i = begin; i < end; ++i) {
    const auto index = static_cast<uint64_t>(i);
    float value = 0;
    switch (parameter.kind) {
      case ParameterKind::kNorm:
        value = 1;
        break;
      case ParameterKind::kBias:
      case ParameterKind::kLoraB:
        value = 0;
        break;
      case ParameterKind::kLoraA:
        value = static_cast<float>((2 * unit(philox_at(key, index, 0, 0)) - 1) * bound);
        break;
      default: {  // Box-Muller
        const double radius = std::sqrt(-2 * std::log(unit(philox_at(key, index, 0, 0))));
        const double angle = 2 * std::numbers::pi * unit(philox_at(key, index, 1, 0));
        value = static_cast<float>(kStddev * radius * std::cos(angle));
      }
    }
    store(dtype, memory, i - begin, value);
  }
}

}  // namespace lm
