// What one layer of a model is. Layers of a model may differ in everything that stands here. A kind names
// formulas that src/model has; code that depends on a kind switches over it, so that the compiler finds every
// place a new kind concerns.
#pragma once

#include <cstdint>

namespace lm {

enum class NormKind : uint8_t { kRms };  // before attention and before the MLP; no bias
enum class AttentionKind : uint8_t {
  kGrouped,
  kGroupedNormed
};  // kGroupedNormed: RMSNorm of q's and k's heads
enum class MlpKind : uint8_t { kSwiGlu };

struct LayerSpec {
  NormKind norm = NormKind::kRms;
  AttentionKind attention = AttentionKind::kGrouped;
  MlpKind mlp = MlpKind::kSwiGlu;
  int64_t window = 0;  // sliding window in tokens, 0: full attention
  bool rope = true;    // q and k are turned by the model's RoPE table; false: they know no positions
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool operator==(const LayerSpec&) const = default;

  bool qk_norm() const {
    switch (attention) {
      case AttentionKind::kGrouped:
        return false;
      case AttentionKind::kGroupedNormed:
        return true;
    }
    return false;
  }
};

}  // namespace lm
