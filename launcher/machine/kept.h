// Figures that take long to measure, kept for a week in the user's cache: one small JSON file for each thing
// that was measured. Keeping is only a saving: what cannot be kept or read is measured again. Any one thread.
#pragma once

#include <functional>
#include <string>

#include "base/json.h"

namespace lm {

// Under `cache_dir` ("": nothing is kept), in `folder`. `key` says what was measured: figures are given for
// the same key alone, to `read`, as one object with the key's fields. False where there are none, or where
// `read` throws, as it does of one that is damaged.
bool read_figures(const std::string& cache_dir, const std::string& folder, const Json& key,
                  const std::function<void(const Json&)>& read);
// `certain` false: for an hour alone. The file; "" where they cannot be kept.
std::string keep_figures(const std::string& cache_dir, const std::string& folder, const Json& key,
                         const Json& figures, bool certain = true);

// A rate among them that can be used: finite and above 0. Throws where it cannot.
double kept_rate(const Json& figures, const char* name);

}  // namespace lm
