// When each operation of a step would run: compute in order, transfers on their links beside it, each as soon
// as its slot, its array and its link are free. Gives the step's time where something is off the device, what
// waits for what, and the bytes that cross each link. Pure arithmetic.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "schedule/schedule.h"

namespace lm {

// Steps one after another with their transfers. The first finds empty slots and nothing deferred; the last is
// like every later one.
inline constexpr int kSteadySteps = 3;
std::vector<StepSchedule> steady_steps(const StepConfig& config);

struct LinkRates {
  double disk_read = 0, disk_write = 0;  // bytes/s, all paths together
  double disk_share = 1;                 // of its rate, that each way has while both are busy
  double link = 0;                       // host memory to GPU and back, each way
  bool assumed = false;
};

// What the walk has to know of where arrays live.
struct TimelineShape {
  struct Array {
    int64_t bytes = 0;
    bool on_disk = false;
    bool in_shards = false;  // of the ranks: a fetch is a call that all of them make
    // Of the bytes, those that a fetch leaves out, for a group of micro-batches: compute asks for them, once
    // after each fetch, and waits. Of all that is left out they are this share: a further group, for which
    // the array stays, asks for as much, and finds that share of it there.
    int64_t routed = 0;
    double routed_share = 1;
  };
  // The CPU's update of a tile beside a GPU, and the bytes that it brings from there and sends there.
  struct HostUpdate {
    bool used = false;
    int64_t brings = 0, sends = 0;
  };
  std::array<std::vector<Array>, kPools> arrays;
  std::vector<HostUpdate> host_updates;  // of each tile; empty: the CPU updates none
  bool host_slots = false;               // the optimizer's slots are the CPU's, in host memory

  HostUpdate host_update(const StepConfig& config, const Operation& op) const {
    if (op.kind != OperationKind::kUpdate || host_updates.empty()) return {};
    return host_updates[static_cast<size_t>(config.tile_array(op.unit, op.tile))];
  }
};

// A step's transfers beside its compute.
struct Timeline {
  double seconds = 0;          // from one check to the next, once the pipeline is full
  double waiting_seconds = 0;  // of these, compute waits for transfers
  double disk_read_bytes = 0, disk_written_bytes = 0;
  double link_bytes = 0;    // between host and GPU, both ways together
  double host_seconds = 0;  // updates by the CPU, beside the GPU
};

// What is busy in a step, beside one another.
enum class Lane : uint8_t { kCompute, kRanks, kHostUpdate, kToDevice, kFromDevice, kDiskRead, kDiskWrite };
inline constexpr int kLanes = 7;

// An operation on its lane, in seconds from the step's begin.
struct LaneSpan {
  Lane lane = Lane::kCompute;
  Operation operation;
  double start = 0, end = 0;
};

// `compute` gives an operation's seconds; of a fetch of what is in shards, those of gathering it. `spans`:
// the step's, where somebody wants them; transfers may end after it.
Timeline walk_timeline(const StepConfig& config, const TimelineShape& shape, const LinkRates& rates,
                       const std::function<double(const Operation&)>& compute,
                       std::vector<LaneSpan>* spans = nullptr);

}  // namespace lm
