// What the keys of [prompt] need: virtual tokens, of a kind that can begin so, and room in a document. Pure.
#pragma once

#include <vector>

#include "config/config.h"
#include "config/key_rule.h"

namespace lm {

// A recorded configuration has every key: the values count.
std::vector<KeyRule> prompt_rules(const Config& config);

}  // namespace lm
