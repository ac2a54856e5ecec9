#include "plan/name_hint.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/name_pattern.h"
#include "config/config_text.h"
#include "config/nearest.h"

namespace lm {

std::string name_hint(const std::string& pattern, const std::vector<std::string>& names) {
  const auto points = static_cast<size_t>(std::ranges::count(pattern, '.'));
  std::set<std::string> runs;
  for (const std::string& name : names)
    for (std::string& run : segment_runs(name, points + 1)) runs.insert(std::move(run));
  const auto hit = nearest(pattern, {runs.begin(), runs.end()});
  return hit ? "; did you mean " + value_text(*hit) + "?" : ", such as " + value_text(names.back());
}

}  // namespace lm
