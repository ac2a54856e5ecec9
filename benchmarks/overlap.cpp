// Is I/O hidden behind compute as far as the step's list of operations allows? A simulated disk of known
// speed, compute as busy waiting of known length, and the real schedule, transfers, store, queue and I/O
// thread; the bound is the same list in plan/timeline.h's arithmetic. io / compute = 0.25 .. 2 for each clip
// mode.
//
//   bench_overlap [ROUNDS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/clock.h"
#include "offload/sim_engine.h"
#include "offload/store.h"
#include "plan/timeline.h"

namespace {

using namespace lm;

constexpr int64_t kLayers = 12, kTiles = 4, kSlots = 8, kTileBytes = 1 * kMiB;
constexpr double kForward = 4e-3, kBackward = 8e-3, kUpdate = 0.5e-3;

double compute_seconds(const Operation& op) {
  switch (op.kind) {
    case OperationKind::kForward:
      return op.block == 0 ? 0 : kForward;
    case OperationKind::kHead:
      return kForward + kBackward;
    case OperationKind::kBackward:
      return op.block == 0 ? 0 : kBackward;
    case OperationKind::kUpdate:
      return kUpdate;
    default:
      return 0;
  }
}

void spin(double seconds) {
  const double end = monotonic_seconds() + seconds;
  while (monotonic_seconds() < end) {
  }
}

PlacementPlan all_tiles_on_disk() {
  PlacementPlan placement;
  PoolPlan& pool = placement.pool(Pool::kOptimizer);
  for (int64_t b = 0; b <= kLayers + 2; ++b) placement.first_tile.push_back(b * kTiles);
  pool.home = Home::kNvme;
  pool.bytes.assign(static_cast<size_t>(placement.first_tile.back()), kTileBytes);
  pool.streamed.assign(pool.bytes.size(), 1);
  pool.slots = kSlots;
  pool.slot_bytes = kTileBytes;
  return placement;
}

// Walks steps as train/step.cpp does, with waiting instead of work.
class Runner {
 public:
  Runner(const PlacementPlan& placement, double rate)
      : placement_(placement),
        pool_(placement.pool(Pool::kOptimizer)),
        space_({{std::filesystem::temp_directory_path().string(), 1}}, Store::swap_bytes(pool_.bytes)),
        disk_(space_.files(),
              {.faults = {}, .depth = 32, .read_bytes_per_s = rate, .write_bytes_per_s = rate}),
        pinned_(DeviceType::kCpu, kSlots * kTileBytes),
        queue_(
            space_, [this] { return disk_.make_engine(); }, kMiB / 4),
        store_({.bytes = pool_.bytes,
                .name = [](int64_t a) { return "tile " + std::to_string(a); },
                .slots = kSlots},
               &space_, &queue_, pinned_),
        transfers_(placement.transfers(kLayers)),
        slots_(transfers_) {}

  double step(const ScheduleShape& shape, const ScheduleShape& next) {
    const double start = monotonic_seconds();
    const StepSchedule list = add_transfers(make_schedule(shape), make_schedule(next), transfers_, slots_);
    for (const Operation& op : list.operations) {
      if (op.kind == OperationKind::kFetch) {
        store_.fetch(op.array, op.slot);
      } else if (op.kind == OperationKind::kWriteBack) {
        store_.all_stamped(op.array);  // checksums are another benchmark's question
        store_.write_back(op.array);
      } else {
        if (op.kind == OperationKind::kUpdate) {
          Arrival arrival = Arrival::kKnown;
          store_.use_unchecked(placement_.first_tile[static_cast<size_t>(op.block)] + op.micro, &arrival);
        }
        spin(compute_seconds(op));
      }
    }
    return monotonic_seconds() - start;
  }

 private:
  const PlacementPlan& placement_;
  const PoolPlan& pool_;
  SwapSpace space_;
  SimDisk disk_;
  PinnedPool pinned_;
  IoQueue queue_;
  Store store_;
  TransferShape transfers_;
  SlotState slots_;
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const PlacementPlan placement = all_tiles_on_disk();
  const double tiles = static_cast<double>(placement.first_tile.back());
  const double compute = kLayers * (kForward + kBackward) + kForward + kBackward + tiles * kUpdate;
  constexpr const char* kClips[] = {"global", "block", "none"};
  double worst = 0;
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock, Clip::kNone}) {
    for (const double share : {0.25, 0.5, 1.0, 2.0}) {
      const double rate = tiles * static_cast<double>(kTileBytes) / (share * compute);
      ScheduleShape shape{.layers = kLayers, .clip = clip, .tiles = placement.update_tiles()};
      const Timeline bound =
          walk_timeline(shape, placement, kLayers, {.disk_read = rate, .disk_write = rate}, compute_seconds);
      Runner runner(placement, rate);
      std::vector<double> seconds;
      ScheduleShape next = shape;
      next.pending = shape.defers();
      for (int round = 0; round < rounds + 2; ++round) {
        shape.pending = round > 0 && next.pending;
        seconds.push_back(runner.step(shape, next));
      }
      std::nth_element(seconds.begin() + 2, seconds.begin() + 2 + rounds / 2, seconds.end());
      const double median = seconds[static_cast<size_t>(2 + rounds / 2)];
      const double ratio = median / bound.seconds;
      worst = std::max(worst, ratio);
      std::printf(
          "clip %-6s  io %.2f x compute: step %6.1f ms, bound %6.1f ms (%.2fx), of it waiting %6.1f ms\n",
          kClips[static_cast<size_t>(clip)], share, median * 1e3, bound.seconds * 1e3, ratio,
          bound.waiting_seconds * 1e3);
      const nlohmann::json row = {
          {"benchmark", "overlap"},  {"clip", kClips[static_cast<size_t>(clip)]}, {"io", share},
          {"step_ms", median * 1e3}, {"bound_ms", bound.seconds * 1e3},           {"ratio", ratio}};
      std::printf("%s\n", row.dump().c_str());
    }
  }
  std::printf("worst: %.2fx of the bound\n", worst);
  return 0;
}
