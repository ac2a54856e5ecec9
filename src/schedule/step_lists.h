// The lists of a run's steps with their transfers, one after another: an estimate times them, and the
// executor walks them. One thread.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "schedule/transfers.h"

namespace lm {

// And what the slots hold behind it.
struct ListWithSlots {
  StepSchedule list;
  SlotState slots;
};

class StepLists {
 public:
  explicit StepLists(StepConfig config) : config_(std::move(config)), slots_(config_) {}
  StepLists(const StepLists&) = delete;
  StepLists& operator=(const StepLists&) = delete;

  const StepConfig& config() const { return config_; }
  // Whether the last step has left updates to what follows.
  bool pending() const { return pending_; }

  // The next step, of so many micro-batches; one like it is expected to follow. Valid until the next call.
  const StepSchedule& step(int64_t micro_batches);
  // The deferred updates alone.
  StepSchedule flush();
  // What the slots hold; from here on they are empty.
  SlotState take_slots() { return std::exchange(slots_, SlotState(config_)); }
  // Forward and loss of one micro-batch, which begins and ends with empty slots.
  const ListWithSlots& evaluation();

 private:
  // A list depends on nothing else.
  struct Known {
    int64_t micro_batches;
    bool pending;
    SlotState before;
    ListWithSlots made;
  };

  const StepConfig config_;
  SlotState slots_;
  bool pending_ = false;
  std::vector<Known> known_;  // the newest last
  std::optional<ListWithSlots> evaluation_;
};

}  // namespace lm
