#include "schedule/timeline.h"

#include <cmath>

#include "schedule/rank_clock.h"
#include "schedule/step_lists.h"

namespace lm {

std::vector<StepSchedule> steady_steps(const StepConfig& config) {
  StepLists lists(config);
  std::vector<StepSchedule> out;
  for (int step = 0; step < kSteadySteps; ++step) out.push_back(lists.step(config.micro_batches));
  return out;
}

void walk_until_steady(const StepConfig& config, const std::function<WalkedStep(const TimedList&)>& walk) {
  constexpr int kMost = 12;  // of the last list
  StepLists lists(config);
  for (int step = 1; step < kSteadySteps; ++step) walk(TimedList(lists.step(config.micro_batches), config));
  const TimedList last(lists.step(config.micro_batches), config);
  WalkedStep before;
  for (int step = 0; step < kMost; ++step) {
    const WalkedStep now = walk(last);
    const auto same = [&](double a, double b) { return std::abs(a - b) <= 1e-4 * now.seconds; };
    if (same(now.seconds, before.seconds) && same(now.behind, before.behind)) return;
    before = now;
  }
}

Timeline walk_timeline(const StepConfig& config, const TimelineShape& shape, const LinkRates& rates,
                       const std::function<double(const Operation&)>& compute, std::vector<LaneSpan>* spans) {
  DiskClock disks;
  RankClock clock(config, shape, rates, disks);
  clock.spans = spans;
  Timeline out;
  walk_until_steady(config, [&](const TimedList& list) {
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
