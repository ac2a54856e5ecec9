// What a configuration with data.streaming cannot have, because all rows of an epoch would have to be known
// for it. Pure.
#pragma once

#include <vector>

#include "config/config.h"
#include "config/key_rule.h"

namespace lm {

// `window_given`: data.shuffle_window is set in the file or on the command line.
std::vector<KeyRule> streaming_rules(const Config& config, bool window_given);

}  // namespace lm
