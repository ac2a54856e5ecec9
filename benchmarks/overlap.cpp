// Our side of overlap.py: is I/O hidden behind compute as far as the step's list of operations allows? A
// simulated disk of known speed, compute as busy waiting of known length, and the real schedule, transfers,
// stores, queue and I/O thread; the bound is the same list in schedule/timeline.h's arithmetic. Each pool
// alone and all together; io / compute = 0.25 .. 2 for each clip mode.
//
//   bench_overlap [ROUNDS = 7] [smoke]
//
// A line of text and a JSON line {pools, clip, io, step_ms, bound_ms, ratio} for each. smoke: global clipping
// and io / compute = 1 alone.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/bytes.h"
#include "base/clock.h"
#include "offload/local_store.h"
#include "plan/plan.h"
#include "schedule/transfers.h"
#include "tests/support/sim_disk.h"

namespace {

using namespace lm;

constexpr int64_t kLayers = 12, kTiles = 4, kMicroBatches = 2, kArrayBytes = 1 * kMiB;
constexpr double kForward = 2e-3, kBackward = 4e-3,
                 kUpdate = 2e-3;  // of a block; forward, backward: each micro
constexpr Pool kEveryPool[] = {Pool::kWeights, Pool::kGradients, Pool::kOptimizer, Pool::kActivations};

// What lives on disk, and the step that goes with it.
struct Setting {
  const char* name;
  std::vector<Pool> pools;
  bool recompute = false;  // block inputs can only move where everything else is made again
  int64_t group = 1;       // as plan/placement.cpp has it: with weights off the device and recomputation all
};

const std::vector<Setting>& settings() {
  static const std::vector<Setting> all = {
      {"optimizer", {Pool::kOptimizer}},
      {"gradients", {Pool::kGradients}},
      {"weights", {Pool::kWeights}},
      {"activations", {Pool::kActivations}, true},
      {"all", {std::begin(kEveryPool), std::end(kEveryPool)}, true, kMicroBatches},
  };
  return all;
}

PlacementPlan on_disk(const Setting& setting) {
  PlacementPlan placement;
  placement.group = setting.group;
  placement.blocks = kLayers + 2;
  for (int64_t b = 0; b <= kLayers + 2; ++b) placement.first_tile.push_back(b * kTiles);
  const std::map<Pool, int64_t> arrays = {{Pool::kWeights, kLayers + 2},
                                          {Pool::kGradients, kLayers + 2},
                                          {Pool::kOptimizer, placement.first_tile.back()},
                                          {Pool::kActivations, (kLayers + 1) * setting.group}};
  for (const auto& [which, count] : arrays) {
    PoolPlan& pool = placement.pool(which);
    const bool moves = std::count(setting.pools.begin(), setting.pools.end(), which) > 0;
    pool.off_device.assign(static_cast<size_t>(count), moves ? 1 : 0);
    pool.bytes.assign(static_cast<size_t>(count), kArrayBytes);
    if (!moves) continue;
    pool.tier_id = TierId::kNvme;
    // As few as the plan gives; of the optimizer's, which it gives more where there is room, some more.
    pool.slots = which == Pool::kOptimizer ? 8 : which == Pool::kActivations ? 4 : 3;
    pool.slot_bytes = kArrayBytes;
  }
  return placement;
}

double compute_seconds(const Operation& op, const StepConfig& shape) {
  switch (op.kind) {
    case OperationKind::kForward:
      return shape.unit(op.unit).role == UnitRole::kEmbedding ? 0 : kForward;
    case OperationKind::kRecompute:
      return kForward;
    case OperationKind::kHead:
      return kForward + kBackward;
    case OperationKind::kBackward:
      return shape.unit(op.unit).role == UnitRole::kEmbedding ? 0 : kBackward;
    case OperationKind::kUpdate:
      return kUpdate / static_cast<double>(shape.unit(op.unit).tiles());
    default:
      return 0;
  }
}

void spin(double seconds) {
  const double end = monotonic_seconds() + seconds;
  while (monotonic_seconds() < end) {
  }
}

// Walks steps as train/step.cpp does, with waiting instead of work.
class Runner {
 public:
  Runner(const PlacementPlan& placement, const StepConfig& config, double rate)
      : space_({{std::filesystem::temp_directory_path().string(), 1}}, bytes(placement, false)),
        disk_(space_.files(),
              {.faults = {}, .depth = 32, .read_bytes_per_s = rate, .write_bytes_per_s = rate}),
        pinned_(DeviceType::kCpu, bytes(placement, true)),
        queue_(
            space_, [this] { return disk_.make_engine(); }, kMiB / 4),
        slots_(config) {
    for (const Pool which : kEveryPool) {
      const PoolPlan& pool = placement.pool(which);
      if (pool.slots == 0) continue;
      store(which) = std::make_unique<LocalStore>(
          LocalStoreSetup{.bytes = pool.bytes,
                          .name = [](int64_t array) { return "array " + std::to_string(array); },
                          .slots = pool.slots,
                          .verify = false},  // checksums are another benchmark's question
          &space_, &queue_, pinned_);
    }
  }

  double step(const StepConfig& shape, const StepConfig& next) {
    const double start = monotonic_seconds();
    const StepSchedule compute = make_schedule(shape);
    // What each operation works on, as the transfers are planned for.
    std::multimap<size_t, std::pair<Pool, int64_t>> uses;
    for (const Pool which : kEveryPool) {
      for (const ArrayUse& use : array_uses(compute, which, shape))
        uses.emplace(use.begin, std::pair(which, use.array));
    }
    size_t index = 0;
    for (const Operation& op : add_transfers(compute, make_schedule(next), shape, slots_).operations) {
      if (op.kind == OperationKind::kFetch) {
        store(op.pool)->fetch(op.array, op.slot);
      } else if (op.kind == OperationKind::kAllocateSlot) {
        store(op.pool)->allocate_slot(op.array, op.slot);
      } else if (op.kind == OperationKind::kWriteBack) {
        store(op.pool)->write_back(op.array);
      } else {
        for (auto [at, end] = uses.equal_range(index++); at != end; ++at)
          store(at->second.first)->use(at->second.second);
        spin(compute_seconds(op, shape));
      }
    }
    return monotonic_seconds() - start;
  }

 private:
  // Of the swap space, or of the slots.
  static int64_t bytes(const PlacementPlan& placement, bool slots) {
    int64_t sum = 0;
    for (const PoolPlan& pool : placement.pools) {
      if (pool.slots > 0) sum += slots ? pool.slots * pool.slot_bytes : LocalStore::swap_bytes(pool.bytes);
    }
    return sum;
  }
  std::unique_ptr<Store>& store(Pool pool) { return stores_[static_cast<size_t>(pool)]; }

  SwapSpace space_;
  SimDisk disk_;
  PinnedPool pinned_;
  IoQueue queue_;
  SlotState slots_;
  std::array<std::unique_ptr<Store>, kPools> stores_;
};

double compute_of_step(const StepConfig& shape) {
  double sum = 0;
  for (const Operation& op : make_schedule(shape).operations) sum += compute_seconds(op, shape);
  return sum;
}

// `share`: of the busier way of the disk, in the step's compute.
void measure(const Setting& setting, Clip clip, const char* clip_name, double share, int rounds) {
  const PlacementPlan placement = on_disk(setting);
  StepConfig shape{.units = placement.units(),
                   .micro_batches = kMicroBatches,
                   .recompute = setting.recompute ? Recompute::kBlock : Recompute::kNone,
                   .clip = clip,
                   .group = setting.group,
                   .first_tile = placement.first_tile};
  for (const Pool which : kEveryPool) shape.pool(which) = placement.through(which);
  StepConfig next = shape;
  next.pending = shape.defers();
  const auto bound_at = [&](double rate) {
    return walk_timeline(shape, placement.timeline(), {.disk_read = rate, .disk_write = rate},
                         [&](const Operation& op) { return compute_seconds(op, shape); });
  };
  const Timeline moved = bound_at(1e9);
  const double rate =
      std::max(moved.disk_read_bytes, moved.disk_written_bytes) / (share * compute_of_step(next));
  const Timeline bound = bound_at(rate);
  Runner runner(placement, shape, rate);
  std::vector<double> seconds;
  for (int round = 0; round < rounds + 2; ++round) {
    shape.pending = round > 0 && next.pending;
    seconds.push_back(runner.step(shape, next));
  }
  // Of the quicker rounds: what else the machine does makes a step longer, never the disk quicker.
  const auto quarter = seconds.begin() + 2 + rounds / 4;
  std::nth_element(seconds.begin() + 2, quarter, seconds.end());
  const double step = *quarter;
  std::printf(
      "%-11s clip %-6s  io %.2f x compute: step %6.1f ms, bound %6.1f ms (%.3fx), of it waiting %6.1f ms\n",
      setting.name, clip_name, share, step * 1e3, bound.seconds * 1e3, step / bound.seconds,
      bound.waiting_seconds * 1e3);
  const nlohmann::json row = {{"pools", setting.name},
                              {"clip", clip_name},
                              {"io", share},
                              {"step_ms", step * 1e3},
                              {"bound_ms", bound.seconds * 1e3},
                              {"ratio", step / bound.seconds}};
  std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const bool smoke = argc > 2 && std::string(argv[2]) == "smoke";
  constexpr const char* kClips[] = {"global", "block", "none"};
  for (const Setting& setting : settings()) {
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock, Clip::kNone}) {
      for (const double share : {0.25, 0.5, 1.0, 2.0}) {
        if (smoke && (clip != Clip::kGlobal || share != 1.0)) continue;
        measure(setting, clip, kClips[static_cast<size_t>(clip)], share, rounds);
      }
    }
  }
  return 0;
}
