#include "schedule/timeline.h"

#include <algorithm>
#include <map>

namespace lm {
namespace {

// The state of compute and links while lists are walked one after another.
class Walk {
 public:
  Walk(const TimelineShape& shape, const LinkRates& rates, bool clip_global)
      : shape_(shape), rates_(rates), clip_global_(clip_global) {}

  void visit(const StepSchedule& list, const std::function<double(const Operation&)>& compute) {
    const TransferShape& shape = shape_.transfers;
    StepSchedule inner;
    for (const Operation& op : list.operations) {
      if (!is_transfer(op)) inner.operations.push_back(op);
    }
    std::multimap<size_t, std::pair<Pool, int64_t>> wanted;  // by operation
    for (int p = 0; p < kPools; ++p) {
      for (const ArrayUse& use : array_uses(inner, static_cast<Pool>(p), shape))
        wanted.emplace(use.begin, std::pair(static_cast<Pool>(p), use.array));
    }
    size_t index = 0;
    for (const Operation& op : list.operations) {
      if (is_transfer(op)) {
        transfer(op);
        continue;
      }
      double arrived = 0;
      for (auto [at, end] = wanted.equal_range(index); at != end; ++at)
        arrived = std::max(arrived, ready_[at->second]);
      ++index;
      if (const auto update = shape_.host_update(op); update.used) {
        const bool inputs_through_slots =
            shape.pool(Pool::kWeights).holds(op.unit) || shape.pool(Pool::kGradients).holds(op.unit);
        update_on_host(update, compute(op), arrived, inputs_through_slots);
        continue;
      }
      wait(std::max(arrived, host_));  // the thread that enqueues this did the updates before it
      now_ += compute(op);
      if (op.kind == OperationKind::kCheck) host_ = now_;
    }
  }

  double now_ = 0, waited_ = 0;
  double read_ = 0, written_ = 0, crossed_ = 0;  // bytes
  double host_seconds_ = 0;

 private:
  using Key = std::pair<Pool, int64_t>;

  void wait(double until) {
    if (until <= now_) return;
    waited_ += until - now_;
    now_ = until;
  }

  // By the CPU, beside what the GPU was given before. It follows the GPU only where that makes its inputs: a
  // block's own norm, or arrays that come through slots of the device.
  void update_on_host(const TimelineShape::HostUpdate& update, double seconds, double arrived,
                      bool inputs_through_slots) {
    if (inputs_through_slots || !clip_global_) host_ = std::max(host_, now_);
    const auto brought = static_cast<double>(update.brings);
    host_ = std::max(host_, arrived) + std::max(seconds, brought / rates_.link);
    host_seconds_ += seconds;
    crossed_ += brought + static_cast<double>(update.sends);
  }

  // Occupies a link from `start` at the earliest.
  static double occupy(double& free_at, double start, double seconds) {
    free_at = std::max(free_at, start) + seconds;
    return free_at;
  }

  void transfer(const Operation& op) {
    const Key slot{op.pool, op.slot}, array{op.pool, op.array};
    const TimelineShape::Array& place =
        shape_.arrays[static_cast<size_t>(op.pool)][static_cast<size_t>(op.array)];
    const auto bytes = static_cast<double>(place.bytes);
    const bool disk = place.on_disk;
    const bool by_host = op.pool == Pool::kOptimizer && !shape_.host_updates.empty();
    const bool gpu = shape_.gpu && !by_host;
    const double issued = by_host ? host_ : now_;
    double done = std::max({issued, slot_free_[slot], home_ready_[array]});
    if (op.kind == OperationKind::kFetch) {
      if (disk) done = occupy(read_free_, done, bytes / rates_.disk_read), read_ += bytes;
      if (gpu) done = occupy(up_free_, done, bytes / rates_.link), crossed_ += bytes;
      ready_[array] = done;
    } else if (op.kind == OperationKind::kClaim) {
      ready_[array] = done;
    } else {
      done = std::max(issued, home_ready_[array]);
      if (gpu) done = occupy(down_free_, done, bytes / rates_.link), crossed_ += bytes;
      if (disk) done = occupy(write_free_, done, bytes / rates_.disk_write), written_ += bytes;
      slot_free_[slot] = home_ready_[array] = done;
    }
  }

  const TimelineShape& shape_;
  const LinkRates& rates_;
  bool clip_global_;
  double host_ = 0;  // the CPU's clock beside a GPU: it has done its work up to there
  double read_free_ = 0, write_free_ = 0, up_free_ = 0, down_free_ = 0;
  std::map<Key, double> slot_free_, home_ready_, ready_;
};

}  // namespace

Timeline walk_timeline(const ScheduleShape& schedule, const TimelineShape& shape, const LinkRates& rates,
                       const std::function<double(const Operation&)>& compute) {
  SlotState slots(shape.transfers);
  Walk walk(shape, rates, schedule.clip == Clip::kGlobal);
  Timeline out;
  ScheduleShape now = schedule;
  ScheduleShape next = schedule;
  next.pending = schedule.defers();
  // The first step finds empty slots and nothing deferred; the third is like every later one.
  for (int step = 0; step < 3; ++step) {
    now.pending = step > 0 && next.pending;
    const double start = walk.now_, waited = walk.waited_;
    const double read = walk.read_, written = walk.written_, crossed = walk.crossed_;
    const double host = walk.host_seconds_;
    walk.visit(add_transfers(make_schedule(now), make_schedule(next), shape.transfers, slots), compute);
    out = {.seconds = walk.now_ - start,
           .waiting_seconds = walk.waited_ - waited,
           .disk_read_bytes = walk.read_ - read,
           .disk_written_bytes = walk.written_ - written,
           .link_bytes = walk.crossed_ - crossed,
           .host_seconds = walk.host_seconds_ - host};
  }
  return out;
}

}  // namespace lm
