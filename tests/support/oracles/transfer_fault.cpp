#include "tests/support/oracles/transfer_fault.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace lm {
namespace {

std::string breach(size_t index, const Operation& op, const std::string& text) {
  return fmt::format("{} {}: {} (operation {})", pool_name(op.pool), op.array, text, index);
}

// Replays one pool's transfers against its uses.
class PoolChecker {
 public:
  PoolChecker(Pool pool, const std::vector<ArrayUse>& uses, std::vector<Slot> slots)
      : pool_(pool), uses_(uses), slots_(std::move(slots)) {}

  std::string transfer(size_t compute, size_t index, const Operation& op) {
    if (op.slot < 0 || static_cast<size_t>(op.slot) >= slots_.size())
      return breach(index, op, "no such slot");
    Slot& slot = slots_[static_cast<size_t>(op.slot)];
    if (op.kind == OperationKind::kWriteBack) {
      if (slot.array != op.array) return breach(index, op, "written from a slot that holds something else");
      slot.changed = false;
      return "";
    }
    for (const ArrayUse& use : uses_) {
      if (use.array == slot.array && use.begin < compute && use.end >= compute)
        return breach(index, op, "takes a slot in use");
    }
    if (slot.array >= 0 && slot.changed) return breach(index, op, "drops what was changed");
    for (const Slot& other : slots_) {
      if (other.array == op.array) return breach(index, op, "is in a slot already");
    }
    slot = {
        .array = op.array, .changed = op.kind == OperationKind::kAllocateSlot, .promised = false, .order = 0};
    return "";
  }

  std::string compute(size_t compute, size_t index) {
    for (; next_ < uses_.size() && uses_[next_].begin == compute; ++next_) {
      const ArrayUse& use = uses_[next_];
      const auto at = std::find_if(slots_.begin(), slots_.end(),
                                   [&](const Slot& slot) { return slot.array == use.array; });
      const Operation op{.kind = OperationKind::kFetch, .pool = pool_, .array = use.array};
      if (use.in_place) {
        if (at != slots_.end()) *at = {};
        continue;
      }
      if (at == slots_.end()) return breach(index, op, "used, and in no slot");
      if (use.changes) at->changed = true;
      if (use.dies) *at = {};
    }
    return "";
  }

 private:
  Pool pool_;
  const std::vector<ArrayUse>& uses_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

}  // namespace

namespace {

// Of shards, which the other pools' transfers use as compute does, or of those pools.
std::string fault_of(bool shards, const StepSchedule& schedule, const StepConfig& config, SlotState before) {
  const auto checked = [&](const Operation& op) {
    return is_transfer(op) && holds_shards(op.pool) == shards;
  };
  const auto ignored = [&](const Operation& op) {
    return is_transfer(op) && holds_shards(op.pool) && !shards;
  };
  StepSchedule users;
  for (const Operation& op : schedule.operations) {
    if (!checked(op) && !ignored(op)) users.operations.push_back(op);
  }
  std::array<std::vector<ArrayUse>, kPools> uses;
  std::vector<PoolChecker> checkers;
  checkers.reserve(kPools);
  for (size_t p = 0; p < kPools; ++p) {
    if (holds_shards(static_cast<Pool>(p)) == shards)
      uses[p] = array_uses(users, static_cast<Pool>(p), config);
    checkers.emplace_back(static_cast<Pool>(p), uses[p], std::move(before.pools[p]));
  }
  size_t at = 0;  // operations of `users` passed
  for (size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& op = schedule.operations[i];
    if (ignored(op)) continue;
    if (checked(op)) {
      const std::string fault = checkers[static_cast<size_t>(op.pool)].transfer(at, i, op);
      if (!fault.empty()) return fault;
      continue;
    }
    for (PoolChecker& checker : checkers) {
      const std::string fault = checker.compute(at, i);
      if (!fault.empty()) return fault;
    }
    ++at;
  }
  return "";
}

}  // namespace

std::string transfer_fault(const StepSchedule& schedule, const StepConfig& config, const SlotState& before) {
  const std::string fault = fault_of(false, schedule, config, before);
  return fault.empty() ? fault_of(true, schedule, config, before) : fault;
}

}  // namespace lm
