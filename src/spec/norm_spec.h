// A norm as data.
#pragma once

#include <cstdint>

namespace lm {

enum class NormKind : uint8_t {
  kRms,  // w · cast(x / rms(x)): rounded to the model's type before the weight multiplies
};

struct NormSpec {
  NormKind kind = NormKind::kRms;
  double eps = 1e-6;
  bool operator==(const NormSpec&) const = default;
};

}  // namespace lm
