// A rank's offloaded state: swap space, pinned memory, the I/O engine and its thread, and a store for each
// pool with arrays that are fetched into slots. Built once, before the weights; never grows afterwards. Owned
// by the rank, used by its compute thread.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "base/trace.h"
#include "comm/machine_memory.h"
#include "comm/shard_store.h"
#include "offload/engines.h"
#include "offload/local_store.h"
#include "plan/plan.h"

namespace lm {

// Replaces the plan's I/O engine, for tests.
using EngineFactory = std::function<std::unique_ptr<IoEngine>(const EngineSetup&)>;
// Replaces the store of a pool, for tests.
using StoreFactory = std::function<std::unique_ptr<Store>(Pool, const LocalStoreSetup&)>;

struct OffDeviceSetup {
  const PlacementPlan& placement;
  const ModelLayout& layout;
  std::vector<SwapPath> paths;
  StreamView stream = {};           // compute's; its threads verify and stamp
  bool training = true;             // false: only weights
  int64_t staging = 0;              // bytes of update_staging, for training
  int64_t swap_spare = 0;           // PlanSizes::swap_spare
  std::vector<int64_t> tiles = {};  // bytes of this rank's; empty: the placement's
  EngineFactory engine = {};
  StoreFactory store = {};
  bool slots_on_device = false;  // tests: even if that is the CPU
  Trace* trace = nullptr;        // records transfers
  Group* group = nullptr;        // of the ranks with shards, for device memory; null: no shards
  // For the frozen weights in host memory, of which a machine has one copy; null: this rank has its own.
  MachineMemory* machine_memory = nullptr;
};

class OffDeviceState {
 public:
  // Throws Error(12, 20, 21, 31): an unusable path, a disk too full, memory that cannot be allocated.
  explicit OffDeviceState(const OffDeviceSetup& setup);
  // Nothing is in flight afterwards, unless a disk hangs: memory of its requests is then leaked until the
  // process ends.
  ~OffDeviceState();

  // Null if no array of the pool is fetched into slots.
  Store* store(Pool pool) const { return stores_[static_cast<size_t>(pool)].get(); }
  // Pinned memory of the embedding's weights if the plan places them there; else null.
  std::byte* embedding() const {
    return common_embedding_ != nullptr ? common_embedding_ : embedding_.data();
  }
  // Whether another rank loads them.
  bool loads_embedding() const { return common_embedding_ == nullptr || fills_common_; }
  // Frozen weights in memory of several ranks: publish_frozen on all of them, then MachineMemory::filled,
  // then adopt_frozen.
  void publish_frozen();
  void adopt_frozen();
  // Pinned, for updates by the CPU in a run on a GPU; empty if there are none.
  std::span<std::byte> update_staging() const { return staging_.bytes(); }
  IoCounters counters() const;
  // Disk space allocated by arrays, of the reserved space; 0 if nothing is on disk.
  int64_t disk_bytes() const;
  // Continues copies between host memory and the device (Store::poll).
  void poll() const;
  // The time that disks and each direction of the link to a GPU have been busy, and that compute has waited
  // for them. On a GPU as collected by its clock.
  double busy_seconds() const;
  double wait_seconds() const;
  // Null on the CPU.
  DeviceClock* clock() const { return clock_.get(); }
  // After an error that ended a step: nothing is in flight, and every array is as if it was never written.
  // Throws Error(21) if a disk hangs.
  void reset();
  bool hangs() const { return queue_ != nullptr && queue_->hangs(); }
  // For the log: engine, paths, and fallbacks with their reasons.
  const std::string& description() const { return description_; }

 private:
  void map_common(const OffDeviceSetup& setup, std::optional<LocalStoreSetup>& weights);
  void place_embedding(const PlacementPlan& placement);
  void open_memory(const OffDeviceSetup& setup, int64_t bytes);
  void open_disks(const OffDeviceSetup& setup, int64_t bytes);

  std::string description_, engine_note_;
  std::unique_ptr<DeviceClock> clock_;
  std::unique_ptr<SwapSpace> space_;
  std::unique_ptr<PinnedPool> pinned_;
  PinnedBlock staging_, embedding_;
  std::byte* common_embedding_ = nullptr;  // in memory of several ranks
  bool fills_common_ = true;
  LocalStore* common_ = nullptr;  // of `stores_`, with arrays there
  std::unique_ptr<IoQueue> queue_;
  std::array<std::unique_ptr<Store>, kPools> stores_;
};

}  // namespace lm
