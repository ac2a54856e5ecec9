// Rules between keys of a configuration; each message names both keys and prints the arithmetic. Pure.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config/config.h"

namespace lm {

struct Conflict {
  std::string key;  // the key that messages blame, "train.micro_batch"
  std::string text;
};

// `given(key)`: the key is set in the file or on the command line. `usable(key)`: its value could be read;
// rules about other keys are skipped.
std::vector<Conflict> find_conflicts(const Config& config,
                                     const std::function<bool(const std::string&)>& given,
                                     const std::function<bool(const std::string&)>& usable);

}  // namespace lm
