// Looks at the first rows of training data without a model, as prepare_tokens will read them. One thread;
// blocks.
#pragma once

#include <string>
#include <vector>

#include "data/hub.h"

namespace lm {

// `entries`: names, globs, or names of data sets. Throws Error(11) for files that are not there, hold no
// rows, or whose first rows could not be trained, and Error(10) for an interpreter that cannot be started.
void look_at_rows(const std::vector<std::string>& entries, const DataCaches& caches,
                  const std::string& python, const std::string& program_dir);

}  // namespace lm
