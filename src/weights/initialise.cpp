#include "weights/initialise.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/parallel.h"
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

// Numbers of a key with second counter word `a`, in runs of 64: a call of Philox gives one to each sixteen.
class Numbers {
 public:
  Numbers(uint64_t key, uint32_t a) : key_(key), a_(a) {}
  uint32_t at(uint64_t index) {
    if (index / 64 != run_) draw(index / 64);
    return words_[index % 64];
  }

 private:
  void draw(uint64_t run) {
    run_ = run;
    for (uint64_t lane = 0; lane < 16; ++lane) {
      const uint64_t call = run * 16 + lane;
      const PhiloxWords<uint32_t> words =
          philox<uint32_t>(key_, static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32), a_, 0);
      for (size_t w = 0; w < 4; ++w) words_[w * 16 + lane] = words.word[w];
    }
  }
  uint64_t key_;
  uint32_t a_;
  uint64_t run_ = UINT64_MAX;
  uint32_t words_[64];
};

// Elements [begin, end) of the tensor; `memory` begins with the first of them.
void fill(const Parameter& parameter, uint64_t key, DType dtype, std::byte* memory, int64_t begin,
          int64_t end) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(parameter.columns));
  Numbers first(key, 0), second(key, 1);
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
        value = static_cast<float>((2 * unit(first.at(index)) - 1) * bound);
        break;
      default: {  // Box-Muller
        const double radius = std::sqrt(-2 * std::log(unit(first.at(index))));
        const double angle = 2 * std::numbers::pi * unit(second.at(index));
        value = static_cast<float>(kStddev * radius * std::cos(angle));
      }
    }
    store(dtype, memory, i - begin, value);
  }
}

}  // namespace

void initialise(const Parameter& parameter, uint64_t seed, uint32_t tensor, DType dtype, std::byte* memory,
                int64_t first_row, int64_t rows, int threads) {
  constexpr int64_t kGrain = 16384;  // elements: most of a millisecond
  const uint64_t key = philox_key(seed, Purpose::kInit, 0, tensor);
  const int64_t first = first_row * parameter.columns;
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  parallel_for(threads, rows * parameter.columns, kGrain, [&](int64_t begin, int64_t end) {
    fill(parameter, key, dtype, memory + begin * size, first + begin, first + end);
  });
}

void initialise_elements(const Parameter& parameter, uint64_t seed, uint32_t tensor, DType dtype,
                         std::byte* memory, int64_t first, int64_t elements) {
  fill(parameter, philox_key(seed, Purpose::kInit, 0, tensor), dtype, memory, first, first + elements);
}

}  // namespace lm
