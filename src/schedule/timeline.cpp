#include "schedule/timeline.h"

#include <cmath>

#include "schedule/rank_clock.h"

namespace lm {

std::vector<StepSchedule> steady_steps(const ScheduleShape& schedule, const TransferShape& transfers) {
  constexpr int kSteps = 3;
  SlotState slots(transfers);
  ScheduleShape now = schedule, next = schedule;
  next.pending = schedule.defers();
  std::vector<StepSchedule> out;
  for (int step = 0; step < kSteps; ++step) {
    now.pending = step > 0 && next.pending;
    out.push_back(add_transfers(make_schedule(now), make_schedule(next), transfers, slots));
  }
  return out;
}

void walk_until_steady(const ScheduleShape& schedule, const TransferShape& transfers,
                       const std::function<WalkedStep(const TimedList&)>& walk) {
  constexpr int kMost = 12;  // of the last list
  std::vector<StepSchedule> steps = steady_steps(schedule, transfers);
  const TimedList last(std::move(steps.back()), transfers);
  steps.pop_back();
  for (StepSchedule& step : steps) walk(TimedList(std::move(step), transfers));
  WalkedStep before;
  for (int step = 0; step < kMost; ++step) {
    const WalkedStep now = walk(last);
    const auto same = [&](double a, double b) { return std::abs(a - b) <= 1e-4 * now.seconds; };
    if (same(now.seconds, before.seconds) && same(now.behind, before.behind)) return;
    before = now;
  }
}

Timeline walk_timeline(const ScheduleShape& schedule, const TimelineShape& shape, const LinkRates& rates,
                       const std::function<double(const Operation&)>& compute, std::vector<LaneSpan>* spans) {
  DiskClock disks;
  RankClock clock(shape, rates, schedule.updates_at_end(), disks);
  clock.spans = spans;
  Timeline out;
  walk_until_steady(schedule, shape.transfers, [&](const TimedList& list) {
    const RankClock before = clock;
    if (spans != nullptr) spans->clear();
    for (size_t i = 0; i < list.operations().size(); ++i) {
      const Operation& op = list.operations()[i];
      clock.pass(list, i, is_transfer(op) && !clock.gathers(op) ? 0 : compute(op));
    }
    out = {.seconds = clock.now - before.now,
           .waiting_seconds = clock.waited - before.waited,
           .disk_read_bytes = clock.read - before.read,
           .disk_written_bytes = clock.written - before.written,
           .link_bytes = clock.crossed - before.crossed,
           .host_seconds = clock.host_seconds - before.host_seconds};
    if (spans != nullptr) {
      for (LaneSpan& span : *spans) span.start -= before.now, span.end -= before.now;
    }
    return WalkedStep{out.seconds, clock.behind()};
  });
  return out;
}

}  // namespace lm
