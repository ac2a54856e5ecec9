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
  std::function<void(int32_t)> on_token = {};  // called for each token; may be empty
  std::function<bool()> stopped = {};          // called between tokens; may be empty
};

struct Answer {
  std::vector<int32_t> tokens;  // without the stop token
  bool full = false;            // the decoder has no room for another token
  double prompt_seconds = 0;    // until the first token
  double seconds = 0;           // of the other tokens
};

// The prompt must have at least one token and fit the rank's decoder. All ranks of a group call it together,
// and continue with rank 0's tokens.
Answer answer_prompt(Rank& rank, std::span<const int32_t> prompt, const AnswerOptions& options);

// --temperature, --top-k, --top-p, --seed. Throws Error(2).
Sampling sampling_of(const CommandLine& line);

}  // namespace lm
