// A norm as data: xn is the normalised input, computed in fp32; `cast` rounds to the model's type. Where the
// rounding stands is the reference's (transformers), which a bf16 model's results depend on.
#pragma once

#include <cstdint>

namespace lm {

enum class NormKind : uint8_t {
  // RMSNorm: xn = x / sqrt(mean(x^2) + eps)
  kRms,        // w * cast(xn): rounded before the weight multiplies
  kRmsLate,    // cast(w * xn)
  kRmsOffset,  // cast((1 + w) * xn): the files hold the factor's distance from 1
  kRmsPlain,   // cast(xn): no weight
  // LayerNorm: xn = (x - mean(x)) / sqrt(variance(x) + eps)
  kLayer,        // cast(w * xn + b)
  kLayerOffset,  // cast((1 + w) * xn + b)
  kLayerNoBias,  // cast(w * xn)
};

struct NormSpec {
  NormKind kind = NormKind::kRms;
  double eps = 1e-6;
  bool operator==(const NormSpec&) const = default;

  bool has_weight() const { return kind != NormKind::kRmsPlain; }
  bool has_bias() const { return kind == NormKind::kLayer || kind == NormKind::kLayerOffset; }
  // The stored weight is added to 1; a fresh one is 0.
  bool offset() const { return kind == NormKind::kRmsOffset || kind == NormKind::kLayerOffset; }
  bool centred() const {
    return kind == NormKind::kLayer || kind == NormKind::kLayerOffset || kind == NormKind::kLayerNoBias;
  }
};

}  // namespace lm
