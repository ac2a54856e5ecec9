// Looks at the first rows of training data, as prepare_tokens will read them. One thread; blocks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/hub.h"

namespace lm {

struct SeenRows {
  int64_t rows = 0;      // that were looked at
  int64_t examples = 0;  // of them that became tokens; 0: the model's directory has no tokenizer
  int64_t length = 0;    // tokens that 99.5 % of the examples have at most
  int64_t longest = 0;   // tokens of the longest example
  int64_t texts = 0;     // examples that are plain text
};

// `model_dir`: whose tokenizer and template; "": nothing becomes tokens. `entries`: names, globs, or names of
// data sets. Throws Error(11) for files that are not there, hold no rows, or whose first rows could not be
// trained, and Error(10) for an interpreter that cannot be started.
SeenRows look_at_rows(const std::vector<std::string>& entries, const DataCaches& caches,
                      const std::string& model_dir, const std::string& python,
                      const std::string& program_dir);

}  // namespace lm
