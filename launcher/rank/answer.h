// A model's answer to a prompt, token by token: generate, chat and the samples of a run.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "launcher/command_line.h"
#include "train/rank.h"
#include "train/sampling.h"

namespace lm {

struct AnswerOptions {
  int64_t most = 128;              // tokens
  std::vector<int32_t> stop = {};  // tokens that end it
  Sampling sampling = {};
  std::function<void(int32_t)> on_token = {};  // as they come; may be empty
  std::function<bool()> stopped = {};          // asked between tokens; may be empty
};

struct Answer {
  std::vector<int32_t> tokens;  // without the one that ended it
  bool full = false;            // with them the text has as many tokens as the decoder has room for
  double prompt_seconds = 0;    // until the first token
  double seconds = 0;           // of the others
};

// The prompt has a token at least and fits the rank's decoder. All ranks of a group call it alike, and go on
// with the first one's tokens.
Answer answer_prompt(Rank& rank, std::span<const int32_t> prompt, const AnswerOptions& options);

// --temperature, --top-k, --top-p, --seed. Throws Error(2).
Sampling sampling_of(const CommandLine& line);

}  // namespace lm
