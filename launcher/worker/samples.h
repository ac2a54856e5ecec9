// Answers to train.sample_prompts at each evaluation: printed, and written as rows of metrics.jsonl. Prompts
// are tokenized at the start; the Python program that knows the tokenizer runs only while it is needed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launcher/worker/answer.h"
#include "launcher/worker/job.h"
#include "train/metrics.h"

namespace lm {

class Samples {
 public:
  // Reads the prompts. Throws Error(10) for an unreadable file, for a prompt without room for an answer, and
  // for what a tokenizer refuses.
  explicit Samples(const Job& job);

  bool empty() const { return prompts_.empty(); }
  // All ranks call it; rank 0 prints. `stopped`, if given, is called before each token, and returns the same
  // on all ranks: an answer that it interrupts is dropped.
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
