// The answers to train.sample_prompts at each evaluation of a run: printed, and kept as rows of
// metrics.jsonl. Prompts are tokens from the start on; the Python program that knows the tokenizer is there
// only while it has something to say.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launcher/rank/answer.h"
#include "launcher/rank/job.h"
#include "train/metrics.h"

namespace lm {

class Samples {
 public:
  // Reads the prompts. Throws Error(10) for a file that cannot be read and for a prompt without room for an
  // answer, and what a tokenizer refuses.
  explicit Samples(const Job& job);

  bool empty() const { return prompts_.empty(); }
  // All ranks call; the first one tells. `stopped`, if given, is asked before each token, and gives the same
  // answer on all ranks: an answer that is cut off by it is dropped.
  void answer(Rank& rank, int64_t step, MetricsFile& metrics,
              const std::function<bool()>& stopped = {}) const;

 private:
  struct SamplePrompt {
    std::string text;
    std::vector<int32_t> tokens;
  };

  const Job& job_;
  AnswerOptions options_;
  std::vector<SamplePrompt> prompts_;
};

}  // namespace lm
