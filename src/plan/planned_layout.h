// The layout of a configured run's model: the one place that reads the configuration for it.
#pragma once

#include "config/config.h"
#include "spec/block_layout.h"

namespace lm {

// Parameter groups are not in it (parameter_groups.h).
ModelLayout planned_layout(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
                           const ExpertShare& share);

}  // namespace lm
