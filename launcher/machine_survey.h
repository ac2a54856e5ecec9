// The machine as the plan sees it, filled from what the survey finds; disks are disk_survey.h's. Rates are
// not measured here (0): the rank measures them, the plan replaces what is unknown.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/machine.h"

namespace lm {

// What `lmlaunch plan` imagines instead of what is there.
struct ImaginedMemory {
  std::optional<int64_t> gpu_bytes, host_bytes;
};

Machine survey_machine(const ImaginedMemory& imagined = {});

}  // namespace lm
