// When each operation of a step would run: compute in order, transfers on their links beside it, each as soon
// as its slot, its array and its link are free. Gives the step's time where something is streamed, what waits
// for what, and the bytes that cross each link. Pure arithmetic.
#pragma once

#include <functional>

#include "plan/plan.h"

namespace lm {

struct LinkRates {
  double disk_read = 0, disk_write = 0;  // bytes/s, all paths together
  double link = 0;                       // host memory to GPU and back, each way
  bool assumed = false;
};
LinkRates link_rates(const Machine& machine, DeviceType device);

// `compute` gives an operation's seconds.
Timeline walk_timeline(const ScheduleShape& schedule, const PlacementPlan& placement, int64_t layers,
                       const LinkRates& rates, const std::function<double(const Operation&)>& compute);

}  // namespace lm
