// Greedy answers to the prompts of eval.generate.data, several at a time, and their scores against the
// references. Prompts are tokenized at the start; the Python program that knows the tokenizer runs only while
// it is needed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "data/prompts.h"
#include "launcher/worker/job.h"
#include "launcher/worker/samples.h"
#include "train/metrics.h"

namespace lm {

class ScoredAnswers {
 public:
  // Reads the prompts. Throws Error(10 or 11) for an unreadable file or row, for a prompt without room for an
  // answer, and for what a tokenizer refuses.
  explicit ScoredAnswers(const Job& job);

  bool empty() const { return rows_.empty(); }
  // All ranks call it; rank 0 has the scores. `stopped`, if given, is called before each token, and returns
  // the same on all ranks: then nullopt. A failure of eval.generate.command is a warning.
  std::optional<AnswerScores> score(Rank& rank, const std::function<bool()>& stopped = {}) const;

 private:
  struct Row {
    ReferencePrompt asked;
    std::vector<int32_t> tokens;
  };
  using Tokens = std::vector<std::vector<int32_t>>;  // of each row's answer

  std::optional<Tokens> generate(Rank& rank, const std::function<bool()>& stopped) const;
  AnswerScores scores_of(const Tokens& answers) const;

  const Job& job_;
  std::vector<int32_t> stop_;
  std::vector<Row> rows_;
};

// What a run's evaluations ask the model.
struct Asked {
  explicit Asked(const Job& job) : samples(job), answers(job) {}
  Samples samples;
  ScoredAnswers answers;
};

}  // namespace lm
