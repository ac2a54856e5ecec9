#include "model/context.h"

#include <c10/util/BFloat16.h>

#include <cmath>
#include <vector>

namespace lm {
namespace {

const int32_t* to_device(const Context& context, const std::vector<int32_t>& values) {
  if (context.device == DeviceType::kCpu) return values.data();
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
  std::byte* const memory = context.arena.allocate(bytes);
  copy_bytes(memory, values.data(), bytes, context.stream);
  return reinterpret_cast<const int32_t*>(memory);
}

}  // namespace

RopeTable::RopeTable(const ModelSpec& spec, int64_t positions, DType dtype, DeviceType device,
                     StreamView stream)
    : positions_(positions),
      elements_(positions * (spec.head_dim / 2)),
      memory_(device, 2 * elements_ * static_cast<int64_t>(sizeof(float))) {
  const std::vector<float> frequency = rope_frequencies(spec);
  const auto half = static_cast<int64_t>(frequency.size());
  std::vector<float> table(static_cast<size_t>(2 * elements_));
  const auto rounded = [dtype](float x) {
    return dtype == DType::kBF16 ? static_cast<float>(c10::BFloat16(x)) : x;
  };
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * frequency[static_cast<size_t>(i)];
      table[static_cast<size_t>(p * half + i)] = rounded(std::cos(angle));
      table[static_cast<size_t>(elements_ + p * half + i)] = rounded(std::sin(angle));
    }
  }
  copy_bytes(memory_.data(), table.data(), memory_.size(), stream);
}

DeviceBatch place_batch(const Context& context, const Batch& batch) {
  return {.host = &batch,
          .token = to_device(context, batch.token),
          .position = to_device(context, batch.position),
          .sample = to_device(context, batch.sample)};
}

}  // namespace lm
