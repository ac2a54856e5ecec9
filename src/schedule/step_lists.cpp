#include "schedule/step_lists.h"

#include <algorithm>

namespace lm {

// Most steps are alike: their lists are kept.
const StepSchedule& StepLists::step(int64_t micro_batches) {
  constexpr size_t kKept = 4;
  constexpr size_t kLong = 1 << 14;  // operations: a plan has room for one such list (plan/sizes.cpp)
  slots_.settle();
  auto at = std::ranges::find_if(known_, [&](const Known& known) {
    return known.micro_batches == micro_batches && known.pending == pending_ && known.before == slots_;
  });
  if (at == known_.end()) {
    std::erase_if(known_, [](const Known& known) { return known.made.list.operations.size() > kLong; });
    if (known_.size() == kKept) known_.erase(known_.begin());
    StepConfig now = config_;
    now.micro_batches = micro_batches;
    now.pending = pending_;
    Known known{micro_batches, pending_, slots_, {make_schedule(now), slots_}};
    now.pending = config_.defers();
    if (config_.uses_slots())
      known.made.list = add_transfers(known.made.list, make_schedule(now), config_, known.made.slots);
    at = known_.insert(known_.end(), std::move(known));
  }
  slots_ = at->made.slots;
  pending_ = config_.defers();
  return at->made.list;
}

StepSchedule StepLists::flush() {
  StepConfig now = config_;
  now.pending = std::exchange(pending_, false);
  return add_transfers(make_flush_schedule(now), {}, config_, slots_);
}

const ListWithSlots& StepLists::evaluation() {
  if (!evaluation_) {
    StepConfig now = config_;
    now.micro_batches = 1;
    now.pools = {};  // but of the weights
    for (const Pool weights : {Pool::kWeights, Pool::kWeightShards})
      now.pool(weights) = config_.pool(weights);
    SlotState slots(now);
    StepSchedule list = add_transfers(make_evaluation_schedule(now), {}, now, slots);
    evaluation_ = {std::move(list), std::move(slots)};
  }
  return *evaluation_;
}

}  // namespace lm
