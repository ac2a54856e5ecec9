// Next-token logits for generation. Each text's keys and values stay in a KV cache, so that only new tokens
// of the next text run through the model: one token, or a turn of a chat. Several texts, each with a cache of
// its own, can be continued together by a token each. Owned by a rank; used by its compute thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/key_value_cache.h"
#include "train/step.h"

namespace lm {

class Decoder {
 public:
  // `positions`: the longest text in tokens, the virtual ones that every text begins with included. `texts`:
  // how many can be continued together.
  struct Size {
    int64_t positions = 0, texts = 1, virtual_tokens = 0;
  };
  Decoder(const Context& context, const Size& size);

  int64_t positions() const { return caches_.front().positions() - virtual_tokens_; }  // of a text alone
  int64_t texts() const { return std::ssize(caches_); }

  // The logits of the token after `text`: [V], valid until the next call. Text number 0 is continued as far
  // as the two agree.
  std::span<const float> logits(TrainStep& step, std::span<const int32_t> text);
  // Invalidates its cache, after a change of the weights.
  void forget() { text_.clear(), caches_.front().set_tokens(0); }

  // Text `number` begins anew with `prompt`. The logits of the token after it, valid until the next call;
  // `each` is given those after each of its tokens (0, 1, ...) and may be empty.
  using RowVisitor = std::function<void(int64_t token, std::span<const float> logits)>;
  std::span<const float> begin(TrainStep& step, int64_t number, std::span<const int32_t> prompt,
                               const RowVisitor& each = {});
  // One token more of each of some texts, all in one pass. Their logits [texts, V], valid until the next
  // call.
  struct Next {
    int64_t text = 0;
    int32_t token = 0;
  };
  std::span<const float> next(TrainStep& step, std::span<const Next> tokens);

 private:
  View row_view(int64_t rows) const;
  // `cache` has the virtual tokens and nothing else.
  void begin_text(TrainStep& step, KeyValueCache& cache);
  // The rows' logits in fp32, once the stream has computed them.
  std::span<const float> read(int64_t rows);

  const Context& context_;
  int64_t virtual_tokens_;
  std::vector<KeyValueCache> caches_;
  std::vector<int32_t> text_;  // the cached tokens of text 0, as logits() has continued it
  Memory logits_;              // [rows, V] of the model's type
  std::vector<std::byte> host_logits_;
  std::vector<float> floats_;
};

}  // namespace lm
