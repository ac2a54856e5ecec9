// Next-token logits for generation. The text's keys and values stay in a KV cache, so that only new tokens of
// the next text run through the model: one token, or a turn of a chat. Owned by a rank; used by its compute
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/key_value_cache.h"
#include "train/step.h"

namespace lm {

class Decoder {
 public:
  // `positions`: the longest text in tokens.
  Decoder(const Context& context, int64_t positions);

  int64_t positions() const { return cache_.positions(); }
  // The logits of the token after `text`: [V], valid until the next call.
  std::span<const float> logits(TrainStep& step, std::span<const int32_t> text);
  // Invalidates the cache, after a change of the weights.
  void forget() { text_.clear(), cache_.set_tokens(0); }

 private:
  const Context& context_;
  KeyValueCache cache_;
  std::vector<int32_t> text_;  // the cached tokens
  Memory logits_;              // [V] of the model's type
  std::vector<std::byte> host_logits_;
  std::vector<float> floats_;
};

}  // namespace lm
