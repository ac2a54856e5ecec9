#include "schedule/rank_clock.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "schedule/transfers.h"

namespace lm {
namespace {

// Occupies a link from `start` at the earliest.
double occupy(double& free_at, double start, double seconds) {
  free_at = std::max(free_at, start) + seconds;
  return free_at;
}

}  // namespace

double DiskClock::pass(Way& way, Way& other, double start, double seconds, double share) {
  if (start > way.until) way.since = way.until = start;
  const double from = std::max(way.until, other.since);
  const double alone = std::min(std::max(0.0, from - way.until), seconds);
  way.until += alone;
  double left = seconds - alone;
  if (const double other_left = other.until - from; left > 0 && other_left > 0) {
    const double together = std::min(left, other_left) / share;
    way.until += together;
    other.until += together * (1 - share);
    left -= together * share;
  }
  return way.until += left;
}

TimedList::TimedList(const StepSchedule& list, const StepConfig& config)
    : list_(list), wanted_(list_.operations.size()) {
  for (const bool shards : {false, true}) {
    if (shards && !config.moves_shards()) return;
    StepSchedule inner;
    std::vector<size_t> place;  // of an operation of `inner`, in the list
    for (size_t i = 0; i < list_.operations.size(); ++i) {
      const Operation& op = list_.operations[i];
      if (is_transfer(op) && (!shards || holds_shards(op.pool))) continue;
      inner.operations.push_back(op);
      place.push_back(i);
    }
    for (int p = 0; p < kPools; ++p) {
      const auto pool = static_cast<Pool>(p);
      if (holds_shards(pool) != shards) continue;
      for (const ArrayUse& use : array_uses(inner, pool, config)) {
        if (!use.in_place) wanted_[place[use.begin]].emplace_back(pool, use.array);
      }
    }
  }
}

RankClock::RankClock(const StepConfig& config, const TimelineShape& shape, const LinkRates& rates,
                     DiskClock& disks)
    : config_(config), shape_(shape), rates_(rates), disks_(disks) {}

double& RankClock::at(Times& times, Pool pool, int64_t index) {
  std::vector<double>& of_pool = times[static_cast<size_t>(pool)];
  const auto i = static_cast<size_t>(index);
  if (of_pool.size() <= i) of_pool.resize(i + 1);
  return of_pool[i];
}

bool RankClock::gathers(const Operation& op) const {
  return op.kind == OperationKind::kFetch && array(op).in_shards;
}

void RankClock::pass(const TimedList& list, size_t i, double seconds) {
  const Operation& op = list.operations()[i];
  if (beside(op)) {
    const double start = ready_beside(list, i);
    return pass_beside(op, start, start + seconds);
  }
  if (is_transfer(op) && !gathers(op)) return transfer(op);
  if (const auto update = shape_.host_update(config_, op); update.used) {
    const bool inputs_through_slots =
        config_.pool(Pool::kWeights).holds(op.unit) || config_.pool(Pool::kGradients).holds(op.unit);
    return update_on_host(op, update, seconds, arrived(list, i), inputs_through_slots);
  }
  arrive(list, i);
  leave(op, now + seconds);
}

void RankClock::arrive(const TimedList& list, size_t i) {
  const Operation& op = list.operations()[i];
  if (is_transfer(op))
    return wait(
        std::max({arrived(list, i), at(slot_free_, op.pool, op.slot), at(source_ready_, op.pool, op.array)}));
  // The thread that enqueues this did the updates before it.
  wait(std::max({arrived(list, i), host_, called(op)}));
  if (computes(op.kind)) bring_routed(op);
}

// The part of a unit's weights that its last fetch has left out, when a group's first pass asks for it. Each
// group begins with forward passes.
void RankClock::bring_routed(const Operation& op) {
  const auto unit = static_cast<size_t>(op.unit);
  if (unit >= asked_.size() || asked_[unit] < 0) return;
  const bool begins = op.kind == OperationKind::kForward && op.micro % config_.group == 0;
  if (asked_[unit] > 0 && !begins) return;
  const auto others = static_cast<double>(asked_[unit]++);
  const Operation fetch{.kind = OperationKind::kFetch, .pool = Pool::kWeights, .array = op.unit};
  const TimelineShape::Array& place = array(fetch);
  const double bytes = static_cast<double>(place.routed) * std::pow(1 - place.routed_share, others);
  double done = now;
  if (place.on_disk) {
    done = DiskClock::pass(disks_.read, disks_.write, now, bytes / rates_.disk_read, rates_.disk_share);
    note(Lane::kDiskRead, fetch, done - bytes / rates_.disk_read, done);
    read += bytes;
  }
  if (config_.on_gpu()) {
    done = occupy(up_free_, done, bytes / rates_.link);
    note(Lane::kToDevice, fetch, done - bytes / rates_.link, done);
    crossed += bytes;
  }
  wait(done);
}

bool RankClock::beside(const Operation& op) const {
  return config_.calls_beside() && (gathers(op) || op.kind == OperationKind::kReduceScatter ||
                                    op.kind == OperationKind::kNorm || op.kind == OperationKind::kGather);
}

double RankClock::ready_beside(const TimedList& list, size_t i) {
  const Operation& op = list.operations()[i];
  const double issued = std::max({now, host_, calls_free_});
  if (!is_transfer(op)) return std::max(issued, arrived(list, i));
  return std::max(
      {issued, arrived(list, i), at(slot_free_, op.pool, op.slot), at(source_ready_, op.pool, op.array)});
}

void RankClock::pass_beside(const Operation& op, double start, double end) {
  note(Lane::kRanks, op, start, end);
  calls_free_ = end;
  if (is_transfer(op)) {
    at(ready_, op.pool, op.array) = end;
  } else if (op.kind == OperationKind::kGather) {
    // What is written back from a slot follows compute.
    if (config_.pool(Pool::kWeights).holds(op.unit) && !config_.unit(op.unit).frozen) return wait(end);
    if (std::ssize(gathered_) <= op.unit) gathered_.resize(static_cast<size_t>(op.unit) + 1);
    gathered_[static_cast<size_t>(op.unit)] = end;
  } else if (config_.pool(Pool::kGradients).holds(op.unit)) {
    at(ready_, Pool::kGradients, op.unit) = end;
  }
}

// What compute waits for of the calls: the check for all, an update that does not follow the check for its
// norm, and who uses weights for these.
double RankClock::called(const Operation& op) const {
  switch (op.kind) {
    case OperationKind::kCheck:
      return calls_free_;
    case OperationKind::kUpdate:
      return config_.updates_at_end() ? 0 : calls_free_;
    case OperationKind::kForward:
    case OperationKind::kHead:
    case OperationKind::kRecompute:
    case OperationKind::kBackward:
    case OperationKind::kTableGradient:
      return op.unit < std::ssize(gathered_) ? gathered_[static_cast<size_t>(op.unit)] : 0;
    default:
      return 0;
  }
}

void RankClock::leave(const Operation& op, double time) {
  const bool call =
      gathers(op) || op.kind == OperationKind::kReduceScatter || op.kind == OperationKind::kGather;
  note(call ? Lane::kRanks : Lane::kCompute, op, now, time);
  now = time;
  if (is_transfer(op)) at(ready_, op.pool, op.array) = now;
  if (op.kind == OperationKind::kCheck) host_ = now;
}

double RankClock::arrived(const TimedList& list, size_t i) {
  double out = 0;
  for (const auto& [pool, array] : list.wanted(i)) out = std::max(out, at(ready_, pool, array));
  return out;
}

double RankClock::behind() const {
  return std::max({now, disks_.read.until, disks_.write.until, up_free_, down_free_, calls_free_}) - now;
}

void RankClock::wait(double until) {
  if (until <= now) return;
  waited += until - now;
  now = until;
}

// By the CPU, beside what the GPU was given before. It follows the GPU only where that makes its inputs: a
// block's own norm, or arrays that come through slots of the device.
void RankClock::update_on_host(const Operation& op, const TimelineShape::HostUpdate& update, double seconds,
                               double arrived, bool inputs_through_slots) {
  if (inputs_through_slots || !config_.updates_at_end()) host_ = std::max(host_, now);
  const auto brought = static_cast<double>(update.brings);
  const double start = std::max(host_, arrived);
  host_ = start + std::max(seconds, brought / rates_.link);
  note(Lane::kHostUpdate, op, start, host_);
  host_seconds += seconds;
  crossed += brought + static_cast<double>(update.sends);
}

void RankClock::transfer(const Operation& op) {
  const TimelineShape::Array& place = array(op);
  const bool leaves_out = op.kind == OperationKind::kFetch && place.routed > 0;
  if (leaves_out) {
    if (std::ssize(asked_) <= op.array) asked_.resize(static_cast<size_t>(op.array) + 1, -1);
    asked_[static_cast<size_t>(op.array)] = 0;
  }
  const auto bytes = static_cast<double>(place.bytes - (leaves_out ? place.routed : 0));
  const bool disk = place.on_disk;
  const bool by_host = op.pool == Pool::kOptimizer && shape_.host_slots;
  const bool link = config_.on_gpu() && !by_host && !place.in_shards;
  // Where CPU and GPU share updates, one thread does the CPU's and enqueues the GPU's.
  const bool shared = op.pool == Pool::kOptimizer && !shape_.host_updates.empty();
  const double issued = by_host ? host_ : shared ? std::max(now, host_) : now;
  double& source_ready = at(source_ready_, op.pool, op.array);
  double& slot_free = at(slot_free_, op.pool, op.slot);
  double done = std::max({issued, slot_free, source_ready});
  const auto move = [&](Lane lane, double& free_at, double rate) {
    done = occupy(free_at, done, bytes / rate);
    note(lane, op, done - bytes / rate, done);
  };
  const auto move_on_disk = [&](Lane lane, DiskClock::Way& way, DiskClock::Way& other, double rate) {
    const double begin = std::max(way.until, done);
    done = DiskClock::pass(way, other, done, bytes / rate, rates_.disk_share);
    note(lane, op, begin, done);
  };
  if (op.kind == OperationKind::kFetch) {
    if (disk) move_on_disk(Lane::kDiskRead, disks_.read, disks_.write, rates_.disk_read), read += bytes;
    if (link) move(Lane::kToDevice, up_free_, rates_.link), crossed += bytes;
    at(ready_, op.pool, op.array) = done;
  } else if (op.kind == OperationKind::kAllocateSlot) {
    at(ready_, op.pool, op.array) = done;
  } else {
    done = std::max({issued, source_ready, at(ready_, op.pool, op.array)});
    if (link) move(Lane::kFromDevice, down_free_, rates_.link), crossed += bytes;
    if (disk) move_on_disk(Lane::kDiskWrite, disks_.write, disks_.read, rates_.disk_write), written += bytes;
    slot_free = source_ready = done;
    // What leaves is in its shard's slot then.
    const std::optional<Pool> shards = shards_of(op.pool);
    if (shards && config_.pool(*shards).holds(op.array)) at(ready_, *shards, op.array) = done;
  }
}

}  // namespace lm
