// What a message says of a pattern of names (base/name_pattern.h) that matches none. Pure.
#pragma once

#include <string>
#include <vector>

namespace lm {

// "; did you mean "model.layers"?", by the runs of as many segments, or ", such as " and the last name.
// REQUIRES: there are names.
std::string name_hint(const std::string& pattern, const std::vector<std::string>& names);

}  // namespace lm
