// Keys and values of a text's tokens, of every layer: what the attention of the tokens that follow reads.
// Whoever generates owns it; the model's forward fills it (DeviceBatch::cache).
#pragma once

#include <cstdint>

#include "base/arena.h"
#include "base/error.h"
#include "base/view.h"
#include "spec/model_spec.h"

namespace lm {

// So many tokens of a prompt pass the model at once: enough for products of matrices to be fast, and what
// they take of the arena stays little whatever the prompt's length.
inline constexpr int64_t kPromptTokens = 512;

class KeyValueCache {
 public:
  // Memory for a text of so many tokens.
  KeyValueCache(const ModelSpec& spec, int64_t positions, DType dtype, DeviceType device)
      : width_(2 * spec.kv_rows()),
        positions_(positions),
        dtype_(dtype),
        memory_(device, bytes(spec, positions, dtype)) {}
  static int64_t bytes(const ModelSpec& spec, int64_t positions, DType dtype) {
    return spec.layer_count() * positions * 2 * spec.kv_rows() * static_cast<int64_t>(dtype_size(dtype));
  }

  int64_t positions() const { return positions_; }
  int64_t tokens() const { return tokens_; }  // of the text so far
  // [positions, 2 n_kv d]: a token's keys, then its values.
  View layer(int64_t layer) const {
    const int64_t size = positions_ * width_ * static_cast<int64_t>(dtype_size(dtype_));
    return view_of(memory_.data() + layer * size, dtype_, positions_, width_);
  }
  // The text is longer, or ends earlier.
  void set_tokens(int64_t tokens) {
    LM_CHECK(tokens >= 0 && tokens <= positions_, std::to_string(tokens) + " tokens");
    tokens_ = tokens;
  }

 private:
  int64_t width_, positions_, tokens_ = 0;
  DType dtype_;
  Memory memory_;
};

}  // namespace lm
