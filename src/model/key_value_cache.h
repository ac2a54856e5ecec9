// Keys and values of a text's tokens, of every layer: what the attention of the tokens that follow reads.
// Whoever generates owns it; the model's forward fills it (DeviceBatch::cache).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "base/view.h"
#include "spec/model_spec.h"

namespace lm {

// So many tokens of a prompt pass the model at once: enough for products of matrices to be fast, and what
// they take of the arena stays little whatever the prompt's length.
inline constexpr int64_t kPromptTokens = 512;
// And so many where the logits after each of them are wanted.
inline constexpr int64_t kScoredTokens = 32;

// Rows of logits that generation holds at once. One text gives its last token's alone.
constexpr int64_t generated_logit_rows(int64_t texts) {
  return texts > 1 ? std::max(texts, kScoredTokens) : 1;
}

class KeyValueCache {
 public:
  // Memory for a text of so many tokens.
  KeyValueCache(const ModelSpec& spec, int64_t positions, DType dtype, DeviceType device)
      : positions_(positions), dtype_(dtype), memory_(device, bytes(spec, positions, dtype)) {
    for (int64_t layer = 0; layer < spec.layer_count(); ++layer) widths_.push_back(width(spec.layer(layer)));
  }
  static int64_t bytes(const ModelSpec& spec, int64_t positions, DType dtype) {
    int64_t columns = 0;
    for (const LayerSpec& layer : spec.layers) columns += width(layer);
    return columns * positions * static_cast<int64_t>(dtype_size(dtype));
  }

  int64_t positions() const { return positions_; }
  int64_t tokens() const { return tokens_; }  // of the text so far
  // [positions, 2 n_kv d]: a token's keys, then its values.
  View layer(int64_t layer) const {
    const auto number = static_cast<size_t>(layer);
    const int64_t before = std::accumulate(widths_.begin(), widths_.begin() + layer, int64_t{0});
    const int64_t first = before * positions_ * static_cast<int64_t>(dtype_size(dtype_));
    return view_of(memory_.data() + first, dtype_, positions_, widths_[number]);
  }
  // The text is longer, or ends earlier.
  void set_tokens(int64_t tokens) {
    LM_CHECK(tokens >= 0 && tokens <= positions_, std::to_string(tokens) + " tokens");
    tokens_ = tokens;
  }

 private:
  // Columns of a layer; 0 without attention, and where it reads another one's.
  static int64_t width(const LayerSpec& layer) {
    const AttentionSpec* const attention = layer.find<AttentionSpec>();
    return attention == nullptr ? 0 : 2 * attention->own_kv_heads() * attention->head_dim;
  }

  std::vector<int64_t> widths_;
  int64_t positions_, tokens_ = 0;
  DType dtype_;
  Memory memory_;
};

}  // namespace lm
