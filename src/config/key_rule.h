// What must hold of a key's value beside another's, as a value. Pure.
#pragma once

#include <string>

namespace lm {

struct KeyRule {
  bool holds = true;
  std::string key, other;  // that messages blame, and that it depends on
  std::string text;
};

}  // namespace lm
