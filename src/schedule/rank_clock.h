// The clocks of one rank while it walks steps' lists: compute in order, transfers on their links beside it.
// The estimate walks one rank. Inside src/schedule and src/plan; one thread.
#pragma once

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "schedule/timeline.h"

namespace lm {

// A list, which is borrowed, and the arrays that each of its operations waits for.
class TimedList {
 public:
  TimedList(const StepSchedule& list, const StepConfig& config);
  const std::vector<Operation>& operations() const { return list_.operations; }
  const std::vector<std::pair<Pool, int64_t>>& wanted(size_t i) const { return wanted_[i]; }

 private:
  const StepSchedule& list_;
  std::vector<std::vector<std::pair<Pool, int64_t>>> wanted_;  // of each operation
};

// What a walk says of a step: its seconds, and how many its links are behind at its end.
struct WalkedStep {
  double seconds = 0, behind = 0;
};
// Walks the steps of a run one after another until they are like every later one: links that are slower than
// compute fall behind it from step to step, until slots hold compute up.
void walk_until_steady(const StepConfig& config, const std::function<WalkedStep(const TimedList&)>& walk);

// The disks of a machine, whose ranks share them.
struct DiskClock {
  // What was given to it so far begins and ends then; it has no pause between.
  struct Way {
    double since = 0, until = 0;
  };
  Way read, write;

  // When a transfer ends that begins at `start` at the earliest and takes `seconds` where the other way has
  // nothing to do. While it has, both have `share` of their rates: the other one ends later, too. (What was
  // said of its transfers stands; those that follow wait for it.)
  static double pass(Way& way, Way& other, double start, double seconds, double share);
};

class RankClock {
 public:
  // Borrows all.
  RankClock(const StepConfig& config, const TimelineShape& shape, const LinkRates& rates, DiskClock& disks);

  // The list's i-th operation, of so many seconds of compute.
  void pass(const TimedList& list, size_t i, double seconds);
  // The same in two parts, where other ranks have a say in when it ends: until its inputs are there, ...
  void arrive(const TimedList& list, size_t i);
  // ... and from then on.
  void leave(const Operation& op, double time);
  // Whether it is a fetch of what is in shards, which is a call of all ranks.
  bool gathers(const Operation& op) const;

  // Whether it runs in the stream of calls, in which one follows the other, and compute goes on. Then: when
  // it can begin, and its time once all ranks are known to have come.
  bool beside(const Operation& op) const;
  double ready_beside(const TimedList& list, size_t i);
  void pass_beside(const Operation& op, double start, double end);

  // Seconds after `now` until links have done what they were given.
  double behind() const;

  double now = 0, waited = 0;
  double read = 0, written = 0, crossed = 0;  // bytes
  double host_seconds = 0;
  std::vector<LaneSpan>* spans = nullptr;  // gets what each lane does; null: nobody asks

 private:
  using Times = std::array<std::vector<double>, kPools>;
  static double& at(Times& times, Pool pool, int64_t index);
  const TimelineShape::Array& array(const Operation& op) const {
    return shape_.arrays[static_cast<size_t>(op.pool)][static_cast<size_t>(op.array)];
  }
  double arrived(const TimedList& list, size_t i);
  double called(const Operation& op) const;
  void wait(double until);
  void bring_routed(const Operation& op);
  void update_on_host(const Operation& op, const TimelineShape::HostUpdate& update, double seconds,
                      double arrived, bool inputs_through_slots);
  void transfer(const Operation& op);
  void note(Lane lane, const Operation& op, double start, double end) const {
    if (spans != nullptr && end > start) spans->push_back({lane, op, start, end});
  }

  const StepConfig& config_;
  const TimelineShape& shape_;
  const LinkRates& rates_;
  DiskClock& disks_;
  double host_ = 0;  // the CPU's clock beside a GPU: it has done its work up to there
  double up_free_ = 0, down_free_ = 0;
  double calls_free_ = 0;         // when the stream of calls has done what it was given so far
  std::vector<double> gathered_;  // when a unit's weights have come from all ranks
  // Of each unit's weights that were fetched without what routers choose: the groups that have asked since;
  // -1: they are whole.
  std::vector<int64_t> asked_;
  Times slot_free_, source_ready_, ready_;
};

}  // namespace lm
