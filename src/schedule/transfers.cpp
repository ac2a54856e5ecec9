#include "schedule/transfers.h"

#include <algorithm>
#include <list>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// Collects one pool's uses while walking a list.
class UseCollector {
 public:
  UseCollector(Pool pool, const StepConfig& config) : pool_(pool), config_(config), open_(size()) {}

  void visit(size_t index, const Operation& op) {
    switch (pool_) {
      case Pool::kWeights:
        return weights(index, op);
      case Pool::kGradients:
        return gradients(index, op);
      case Pool::kOptimizer:
        if (op.kind == OperationKind::kUpdate)
          add({index, index, config_.tile_array(op.unit, op.tile), true, true, false});
        return;
      case Pool::kActivations:
        if (size() > 0) activations(index, op);
        return;
      case Pool::kWeightShards:
        return weight_shards(index, op);
      case Pool::kGradientShards:
        return gradient_shards(index, op);
    }
  }

  std::vector<ArrayUse> take() {
    const auto earlier = [](const ArrayUse& a, const ArrayUse& b) { return a.begin < b.begin; };
    // Weights and their shards are collected when a use ends, in another order.
    if (!std::is_sorted(uses_.begin(), uses_.end(), earlier))
      std::stable_sort(uses_.begin(), uses_.end(), earlier);
    return std::move(uses_);
  }

 private:
  size_t size() const { return config_.pool(pool_).through_slots.size(); }

  void add(const ArrayUse& use) {
    if (config_.pool(pool_).holds(use.array)) uses_.push_back(use);
  }

  void weights(size_t index, const Operation& op) {
    if (!config_.pool(pool_).holds(op.unit)) return;
    const auto a = static_cast<size_t>(op.unit);
    if (op.kind == OperationKind::kAcquire) open_[a] = index;
    if (op.kind == OperationKind::kRelease) add({open_[a], index, op.unit, true, false, false});
    const bool changes = op.kind == OperationKind::kUpdate || op.kind == OperationKind::kGather;
    if (!changes || config_.unit(op.unit).frozen) return;
    const bool in_place = config_.unit(op.unit).in_shards;
    add({index, index, op.unit, !in_place, !in_place, false, in_place});
  }

  void gradients(size_t index, const Operation& op) {
    if (!config_.pool(pool_).holds(op.unit)) return;
    if (op.kind == OperationKind::kBackward) add({index, index, op.unit, op.micro > 0, true, false});
    if (op.kind == OperationKind::kAddRows) add({index, index, op.unit, true, true, false});
    if (op.kind == OperationKind::kReduceScatter) add({index, index, op.unit, true, true, false});
    if (op.kind == OperationKind::kNorm) add({index, index, op.unit, true, false, false});
    if (op.kind == OperationKind::kUpdate)
      add({index, index, op.unit, true, false, op.tile + 1 >= config_.unit(op.unit).end_tile});
  }

  // A gather reads the rank's shard, an update changes it: it stays where it is until all tiles are done,
  // which a CPU beside a GPU stages ahead.
  void weight_shards(size_t index, const Operation& op) {
    if (op.kind == OperationKind::kFetch && op.pool == Pool::kWeights)
      add({index, index, op.array, true, false, false});
    const ScheduleUnit& unit = config_.unit(op.unit);
    if (op.kind != OperationKind::kUpdate || !unit.in_shards || !config_.pool(pool_).holds(op.unit)) return;
    size_t& begin = open_[static_cast<size_t>(op.unit)];
    if (op.tile == unit.first_tile) begin = index;
    if (op.tile + 1 == unit.end_tile) add({begin, index, op.unit, true, true, false});
  }

  // What leaves the slot of a gradient is the rank's shard of the sum, and that alone comes back, until its
  // unit has been updated.
  void gradient_shards(size_t index, const Operation& op) {
    const bool whole = is_transfer(op) && op.pool == Pool::kGradients;
    if (whole && op.kind == OperationKind::kWriteBack) add({index, index, op.array, false, true, false});
    if (whole && op.kind == OperationKind::kFetch) add({index, index, op.array, true, false, false});
    if (op.kind == OperationKind::kUpdate && op.tile + 1 >= config_.unit(op.unit).end_tile)
      add({index, index, op.unit, false, false, true, true});
  }

  void activations(size_t index, const Operation& op) {
    // Segments work on the rows that the final norm picked.
    const UnitRole role = config_.unit(op.unit).role;
    if (role == UnitRole::kVocabularySegment) return;
    const int64_t block = config_.unit(op.unit).block;
    const auto input = [&](int64_t b) { return config_.input_array(b, op.micro); };
    // Of the backwards: a second one finds nothing but block inputs; else a second forward comes first.
    const bool last = !config_.two_pass_clip() || checked_ || !config_.recompute.whole();
    const Recompute level = config_.recompute.of(block);
    const bool trained = role == UnitRole::kBody && block >= config_.first_trained;
    switch (op.kind) {
      case OperationKind::kForward:
        if (role == UnitRole::kEmbedding) checked_ = false;
        if (role != UnitRole::kEmbedding) {
          const bool keeps = trained && level != Recompute::kBlock;  // behind its input
          add({index, index, input(block), true, keeps, block < config_.first_trained});
        }
        if (role != UnitRole::kFinalNorm) add({index, index, input(block + 1), false, true, false});
        break;
      case OperationKind::kHead:
        add({index, index, input(block), true, false, last});
        break;
      case OperationKind::kBackward:
        if (role == UnitRole::kFinalNorm || (trained && level == Recompute::kNone))
          add({index, index, input(block), true, false, last});
        break;
      case OperationKind::kRecompute:  // its backward follows at once
        add({index, index + 1, input(block), true, false, last});
        break;
      case OperationKind::kCheck:
        checked_ = true;
        break;
      default:
        break;
    }
  }

  Pool pool_;
  const StepConfig& config_;
  std::vector<size_t> open_;  // weights: where the unit was acquired; their shards: its first tile
  bool checked_ = false;      // activations: since the step began
  std::vector<ArrayUse> uses_;
};

// A transfer before operation `position`; write-backs (0) stand before fetches (1), which may take over the
// slot.
struct Insertion {
  size_t position;
  int after;
  Operation operation;
};

// Of a list with what follows it: its own operations, and behind how many of both no transfer is wanted.
struct Horizon {
  size_t length, end;
};

// One pool over this list and the next.
class PoolPlanner {
 public:
  PoolPlanner(Pool pool, const StepConfig& config, Horizon horizon, std::vector<Slot>& state,
              std::vector<Insertion>& inserted)
      : pool_(pool),
        length_(horizon.length),
        end_(horizon.end),
        state_(state),
        inserted_(inserted),
        slot_of_(config.pool(pool).through_slots.size(), state.size()),
        left_at_(slot_of_.size()) {
    for (const Slot& slot : state) {
      const size_t s = work_.size();
      work_.push_back({slot, 0, 0, {}, nullptr});
      moved_.push_back(s);
      work_[s].entry = std::prev(moved_.end());
      work_[s].order = &moved_;
      if (slot.array >= 0) slot_of_[static_cast<size_t>(slot.array)] = s;
      line_up(s);
    }
  }

  void run(const std::vector<ArrayUse>& uses) {
    for (const ArrayUse& use : uses) visit(use);
  }

 private:
  struct Work {
    Slot slot;
    size_t free_at;     // first position at which a transfer may take the slot
    size_t changed_at;  // position after its last change
    std::list<size_t>::iterator entry;
    std::list<size_t>* order;  // that its entry is in
  };

  static size_t index(const ArrayUse& use) { return static_cast<size_t>(use.array); }

  void visit(const ArrayUse& use) {
    if (use.in_place) return change_in_place(use);
    const size_t s = find(index(use)) < work_.size() ? find(index(use)) : bring(use);
    Work& w = work_[s];
    ++order_;
    w.slot.order = order_;
    w.slot.promised = false;
    w.free_at = use.end + 1;
    if (use.changes) {
      w.slot.changed = true;
      w.changed_at = use.end + 1;
    }
    left_at_[index(use)] = use.end + 1;
    if (use.dies) fill(s, {.array = -1, .changed = false, .promised = false, .order = order_});
    line_up(s);
    if (use.begin < length_) state_[s] = w.slot;
  }

  void change_in_place(const ArrayUse& use) {
    left_at_[index(use)] = use.end + 1;
    const size_t s = find(index(use));
    if (s == work_.size()) return;
    if (use.dies) work_[s].free_at = use.end + 1;  // until then it is nowhere else
    fill(s, {.array = -1, .changed = false, .promised = false, .order = work_[s].slot.order});
    line_up(s);
    if (use.begin < length_) state_[s] = work_[s].slot;
  }

  size_t find(size_t array) const { return slot_of_[array]; }

  void fill(size_t s, const Slot& slot) {
    Slot& old = work_[s].slot;
    if (old.array >= 0) slot_of_[static_cast<size_t>(old.array)] = work_.size();
    if (slot.array >= 0) slot_of_[static_cast<size_t>(slot.array)] = s;
    old = slot;
  }

  // Moves the slot to where it stands in the order of those that make room, mostly to the end of one.
  void line_up(size_t s) {
    Work& w = work_[s];
    moved_.splice(moved_.end(), *w.order, w.entry);
    w.order = &orders_[w.slot.promised ? 2 : w.slot.array >= 0 ? 1 : 0];
    const auto later = [&](size_t other) {
      return std::pair(work_[other].slot.order, other) > std::pair(w.slot.order, s);
    };
    auto at = w.order->end();
    while (at != w.order->begin() && later(*std::prev(at))) --at;
    w.order->splice(at, moved_, w.entry);
  }

  size_t bring(const ArrayUse& use) {
    const size_t s = victim(use.begin);
    Work& w = work_[s];
    size_t position = w.free_at;
    if (w.slot.array >= 0 && w.slot.changed) {
      insert(w.changed_at, 0, OperationKind::kWriteBack, w.slot.array, s);
      // The tier knows it from there on, whether or not the array leaves its slot within this list.
      if (w.changed_at <= length_ && state_[s].array == w.slot.array) state_[s].changed = false;
      position = std::max(position, w.changed_at);
      size_t& left_at = left_at_[static_cast<size_t>(w.slot.array)];
      left_at = std::max(left_at, w.changed_at);
    }
    position = std::max(position, left_at_[index(use)]);
    insert(position, 1, use.needs ? OperationKind::kFetch : OperationKind::kAllocateSlot, use.array, s);
    fill(s, {.array = use.array, .changed = false, .promised = true, .order = order_});
    w.free_at = position;
    if (position <= length_) state_[s] = w.slot;
    return s;
  }

  size_t victim(size_t begin) const {
    for (const std::list<size_t>& order : orders_) {
      for (size_t s : order) {
        if (work_[s].free_at <= begin) return s;
      }
    }
    LM_CHECK(false, std::string("too few slots for ") + pool_name(pool_));
  }

  void insert(size_t position, int after, OperationKind kind, int64_t array, size_t slot) {
    if (position > end_) return;
    inserted_.push_back(
        {position, after, {.kind = kind, .pool = pool_, .array = array, .slot = static_cast<int64_t>(slot)}});
  }

  Pool pool_;
  size_t length_, end_;
  std::vector<Slot>& state_;
  std::vector<Insertion>& inserted_;
  std::vector<Work> work_;
  // Slots as they make room: those without worth, then those used longest ago, and last what was fetched for
  // a use to come.
  std::array<std::list<size_t>, 3> orders_;
  std::list<size_t> moved_;      // holds an entry on its way from one order to another
  std::vector<size_t> slot_of_;  // of each array; work_.size(): it is in none
  std::vector<size_t> left_at_;  // of each array: from where on it may be brought once more
  int64_t order_ = 1;            // what was carried over was used before
};

}  // namespace

SlotState::SlotState(const StepConfig& config) {
  for (size_t p = 0; p < kPools; ++p) pools[p].resize(static_cast<size_t>(config.pools[p].slots));
}

void SlotState::settle() {
  for (std::vector<Slot>& pool : pools) {
    std::vector<int64_t> orders;
    for (const Slot& slot : pool) orders.push_back(slot.order);
    std::ranges::sort(orders);
    orders.erase(std::unique(orders.begin(), orders.end()), orders.end());
    for (Slot& slot : pool) slot.order = std::ranges::lower_bound(orders, slot.order) - orders.end();
  }
}

std::vector<ArrayUse> array_uses(const StepSchedule& schedule, Pool pool, const StepConfig& config) {
  UseCollector collector(pool, config);
  for (size_t i = 0; i < schedule.operations.size(); ++i) collector.visit(i, schedule.operations[i]);
  return collector.take();
}

namespace {

// A list, and what is expected behind its first `length` operations.
struct WithNext {
  StepSchedule both;
  size_t length = 0;
};

// Adds the transfers of shards, or of all other pools. `last`: nobody asks any more for what follows the
// list.
void add_transfers_of(bool shards, bool last, const StepConfig& config, SlotState& state, WithNext& list) {
  std::vector<Insertion> inserted;
  const size_t length = list.length, end = last ? length : list.both.operations.size();
  for (int p = 0; p < kPools; ++p) {
    const auto pool = static_cast<Pool>(p);
    if (config.pool(pool).slots == 0 || holds_shards(pool) != shards) continue;
    PoolPlanner(pool, config, {length, end}, state.pools[static_cast<size_t>(p)], inserted)
        .run(array_uses(list.both, pool, config));
  }
  std::stable_sort(inserted.begin(), inserted.end(), [](const Insertion& a, const Insertion& b) {
    return std::pair(a.position, a.after) < std::pair(b.position, b.after);
  });
  const std::vector<Operation> before = std::exchange(list.both.operations, {});
  list.both.operations.reserve(end + inserted.size());
  auto transfer = inserted.begin();
  for (size_t i = 0; i <= end; ++i) {
    for (; transfer != inserted.end() && transfer->position == i; ++transfer)
      list.both.operations.push_back(transfer->operation);
    if (i == length) list.length = list.both.operations.size();
    if (i < end) list.both.operations.push_back(before[i]);
  }
}

}  // namespace

StepSchedule add_transfers(const StepSchedule& step, const StepSchedule& next, const StepConfig& config,
                           SlotState& state) {
  if (!config.uses_slots()) return step;
  state.settle();
  WithNext list{step, step.operations.size()};
  list.both.operations.insert(list.both.operations.end(), next.operations.begin(), next.operations.end());
  add_transfers_of(false, !config.moves_shards(), config, state, list);
  if (config.moves_shards()) add_transfers_of(true, true, config, state, list);
  return std::move(list.both);
}

}  // namespace lm
