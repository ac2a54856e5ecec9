// What comes after a text, token by token. The text's keys and values stay in a cache, so that of the next
// text only what is new passes the model: a token, or a turn of a chat. Owned by a rank; its compute thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/key_value_cache.h"
#include "train/step.h"

namespace lm {

class Decoder {
 public:
  // Texts have at most so many tokens.
  Decoder(const Context& context, int64_t positions);

  int64_t positions() const { return cache_.positions(); }
  // What the model says of the token after `text`: [V], until the next call.
  std::span<const float> logits(TrainStep& step, std::span<const int32_t> text);
  // The weights are other ones: what is cached holds no more.
  void forget() { text_.clear(), cache_.set_tokens(0); }

 private:
  const Context& context_;
  KeyValueCache cache_;
  std::vector<int32_t> text_;  // that the cache holds
  Memory logits_;              // [V] of the model's type
  std::vector<std::byte> host_logits_;
  std::vector<float> floats_;
};

}  // namespace lm
