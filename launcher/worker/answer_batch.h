// Answers to several prompts together: a prompt passes the model alone, then every step gives each text one
// token. For generate --prompts, evaluation by generation and serve. One thread, that of the rank's compute.
// The ranks of a group do the same together, and continue with rank 0's tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "launcher/command_line.h"
#include "train/rank.h"
#include "train/sampling.h"

namespace lm {

struct AnswerRequest {
  std::vector<int32_t> prompt;     // one token or more
  int64_t most = 128;              // tokens of the answer
  std::vector<int32_t> stop = {};  // tokens that end it
  Sampling sampling = {};
  // The logits after each token of the prompt: the prompt then passes in small parts. May be empty.
  Decoder::RowVisitor on_prompt = {};
  // The answer's next token and the logits that it was chosen from; false ends the answer.
  std::function<bool(int32_t token, std::span<const float> logits)> on_token;
  // The answer has ended: by a stop token or on_token's result, or because it has no room for another token.
  std::function<void(bool stopped)> on_end;
};

// --batch of generate and serve: texts that are continued together. Throws Error(2).
int64_t texts_together(const CommandLine& line);

class AnswerBatch {
 public:
  // `rank`: one with a decoder.
  explicit AnswerBatch(Rank& rank);

  bool has_room() const { return running() < std::ssize(places_); }
  int64_t running() const;
  // Passes the prompt and chooses the first token; the answer may have ended then. Only if there is room.
  // The prompt fits the decoder.
  void add(AnswerRequest request);
  // One token more of every answer under way.
  void step();

 private:
  struct Running {
    AnswerRequest request;
    int64_t tokens = 0;  // of the answer
    int32_t last = 0;
  };
  // Chooses and reports the next token of a place; frees the place if the answer has ended.
  void choose(size_t place, std::span<const float> logits);

  Rank& rank_;
  std::vector<std::optional<Running>> places_;
};

}  // namespace lm
