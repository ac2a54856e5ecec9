#include "weights/initialise.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "base/parallel.h"
#include "base/philox.h"

namespace lm {
namespace {

constexpr double kStddev = 0.02;  // initializer_range of the families we train

void store(DType dtype, std::byte* memory, int64_t index, float value) {
  const uint16_t rounded = dtype == DType::kF16 ? to_fp16(value).bits : to_bf16(value).bits;
  dtype == DType::kF32 ? std::memcpy(memory + index * 4, &value, 4)
                       : std::memcpy(memory + index * 2, &rounded, 2);
}

// In (0, 1]: never 0, so that its logarithm exists.
double unit(uint32_t word) {
  return (static_cast<double>(word) + 1.0) / 4294967296.0;
}

// Numbers of a key with second counter word `a`, in blocks of 64: each Philox call produces one for each
// sixteen.
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

// N(0, 1), by Box and Muller.
double normal(Numbers& first, Numbers& second, uint64_t index) {
  const double radius = std::sqrt(-2 * std::log(unit(first.at(index))));
  const double angle = 2 * std::numbers::pi * unit(second.at(index));
  return radius * std::cos(angle);
}

// The initial value of element `index` of the tensor.
float fresh(const Parameter& parameter, double bound, Numbers& first, Numbers& second, uint64_t index) {
  switch (parameter.role) {
    case TrainableRole::kLoraA:
      // peft begins the embedding's with N(0, 1).
      if (parameter.kind == ParameterKind::kEmbedding)
        return static_cast<float>(normal(first, second, index));
      [[fallthrough]];
    case TrainableRole::kEncoder:  // torch's nn.Linear
      return static_cast<float>((2 * unit(first.at(index)) - 1) * bound);
    case TrainableRole::kLoraB:
    case TrainableRole::kMagnitude:  // load_store sets it to the lengths of the base's rows
    case TrainableRole::kStartA:     // nobody asks: they are computed
    case TrainableRole::kStartB:
      return 0;
    case TrainableRole::kOutputScale:
    case TrainableRole::kInputScale:
      return 1;
    case TrainableRole::kPrefix:  // peft's nn.Embedding
    case TrainableRole::kPrompt:
      return static_cast<float>(normal(first, second, index));
    case TrainableRole::kReplacement:  // of a base that is not drawn, load_store copies it
    case TrainableRole::kBias:
    case TrainableRole::kTokenRows:  // load_store copies them
    case TrainableRole::kWeight:
    case TrainableRole::kWhole:
      break;
  }
  switch (parameter.kind) {
    case ParameterKind::kNorm:
    case ParameterKind::kBuffer:
    case ParameterKind::kFactors:
      return parameter.neutral;
    case ParameterKind::kBias:
    case ParameterKind::kMagnitude:
      return 0;
    case ParameterKind::kEmbedding:
    case ParameterKind::kMatrix:
    case ParameterKind::kSinks:
      break;
  }
  return static_cast<float>(kStddev * normal(first, second, index));
}

}  // namespace

void initialise_elements(const FreshTensor& tensor, std::byte* memory, int64_t first, int64_t elements) {
  const Parameter& parameter = tensor.parameter;
  const uint64_t key = philox_key(tensor.seed, Purpose::kInit, 0, tensor.number);
  const int64_t inputs = parameter.fan_in > 0 ? parameter.fan_in : parameter.columns;
  const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
  Numbers one(key, 0), two(key, 1);
  for (int64_t i = 0; i < elements; ++i)
    store(tensor.dtype, memory, i, fresh(parameter, bound, one, two, static_cast<uint64_t>(first + i)));
}

void initialise(const FreshTensor& tensor, std::byte* memory, int64_t first_row, int64_t rows, int threads) {
  constexpr int64_t kGrain = 16384;  // elements: most of a millisecond
  const int64_t columns = tensor.parameter.columns, first = first_row * columns;
  const auto size = static_cast<int64_t>(dtype_size(tensor.dtype));
  parallel_for(threads, rows * columns, kGrain, [&](int64_t begin, int64_t end) {
    initialise_elements(tensor, memory + begin * size, first + begin, end - begin);
  });
}

}  // namespace lm
