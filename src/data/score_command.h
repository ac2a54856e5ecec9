// A program of the user's that scores answers: started without a shell, given JSON lines of prompt, answer
// and reference, it prints a number or a JSON object of numbers. Its output is bounded and its time limited;
// its failure is an answer, not an error. Blocks; one thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/answer_scores.h"

namespace lm {

struct CommandScores {
  NamedScores scores = {};   // by the names that it printed; of a number alone: "command"
  std::string failure = {};  // why there are none; "": there are some
};

// `argv`: a program, by path or looked up in PATH, and its arguments. It is killed after `seconds`. The first
// lines of its standard error go to the log.
CommandScores run_score_command(const std::vector<std::string>& argv, int64_t seconds,
                                std::span<const ScoredAnswer> answers);

// What it printed.
CommandScores parse_scores(const std::string& output);

}  // namespace lm
