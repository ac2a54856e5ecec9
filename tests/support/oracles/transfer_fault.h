// Test oracle: replays a list with its transfers, slot by slot. Pure.
#pragma once

#include <string>

#include "schedule/transfers.h"

namespace lm {

// Empty, or the first breach of these rules: every use finds its array in a slot, with the bytes of its last
// change; no changed array is dropped; a slot is reused only after its array's last use. `before` is the
// state that add_transfers was given.
std::string transfer_fault(const StepSchedule& schedule, const StepConfig& config, const SlotState& before);

}  // namespace lm
