// A cache of figures that take long to measure, kept for a week in the user's cache directory: one small JSON
// file for each measurement. Errors are ignored: what cannot be cached or read is measured again. Any one
// thread.
#pragma once

#include <functional>
#include <string>

#include "base/json.h"

namespace lm {

// Files in `folder` under `cache_dir` ("": nothing is cached). `key` identifies the measurement: passes the
// figures of the same key to `read`, as one object with the key's fields. False if there are none, or if
// `read` throws, as it does if they are damaged.
bool read_figures(const std::string& cache_dir, const std::string& folder, const Json& key,
                  const std::function<void(const Json&)>& read);
// `certain` false: cached for an hour only. Returns the file; "" if nothing could be cached.
std::string cache_figures(const std::string& cache_dir, const std::string& folder, const Json& key,
                          const Json& figures, bool certain = true);

// A usable rate of the figures: finite and above 0. Throws if it is not.
double cached_rate(const Json& figures, const char* name);

}  // namespace lm
