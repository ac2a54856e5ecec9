// Samples the first rows of training data, as prepare_tokens will read them. One thread; blocks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/hub.h"

namespace lm {

struct SeenRows {
  int64_t rows = 0;      // sampled rows
  int64_t examples = 0;  // tokenized examples; 0: the model's directory has no tokenizer
  int64_t length = 0;    // tokens: the 99.5 % quantile of the examples
  int64_t longest = 0;   // tokens of the longest example
  int64_t texts = 0;     // examples that are plain text
};

// `model_dir`: has the tokenizer and template; "": nothing is tokenized. `entries`: names, globs, or names of
// data sets. Throws Error(11) for missing files, files without rows, or invalid first rows, and Error(10) for
// an interpreter that cannot be started.
SeenRows look_at_rows(const std::vector<std::string>& entries, const DataCaches& caches,
                      const std::string& model_dir, const std::string& python,
                      const std::string& program_dir);

}  // namespace lm
