// What a run says about the examples that it trains on, and what it refuses. `place`: the user's files.
#pragma once

#include <cstdint>
#include <string>

#include "data/packing.h"

namespace lm {

// Throws Error(11) for data without an example or without a target.
void check_targets(const std::string& place, const PieceCounts& counts);
// Logs that few tokens are targets, and that answers lose their ends.
void warn_of_losses(const std::string& place, const PieceCounts& counts, int64_t max_length);

}  // namespace lm
