// What a rank keeps off its device: swap space, pinned memory, the ring and its thread, and a store for each
// pool of which something passes through slots. Built once, before the first weight; nothing of it grows
// afterwards. The rank owns it, its compute thread uses it.
#pragma once

#include <array>
#include <functional>
#include <memory>

#include "base/trace.h"
#include "comm/shard_store.h"
#include "offload/engines.h"
#include "offload/local_store.h"
#include "plan/plan.h"

namespace lm {

// Replaces the engine that the plan names, for tests.
using EngineFactory = std::function<std::unique_ptr<IoEngine>(const EngineSetup&)>;
// Replaces the store of a pool, for tests.
using StoreFactory = std::function<std::unique_ptr<Store>(Pool, const LocalStoreSetup&)>;

struct OffDeviceSetup {
  const PlacementPlan& placement;
  const ModelLayout& layout;
  std::vector<SwapPath> paths;
  StreamView stream = {};  // compute's; its threads check and stamp
  bool training = true;    // false: weights alone
  int64_t staging = 0;     // bytes of update_staging, where training
  EngineFactory engine = {};
  StoreFactory store = {};
  bool slots_on_device = false;  // tests: even where that is the CPU
  Trace* trace = nullptr;        // transfers are told to it
  Group* group = nullptr;  // of the ranks that have shards, for the device's memory; null: there are none
};

class OffDeviceState {
 public:
  // Throws Error(12, 20, 21, 31): a path that cannot be used, a disk too full, memory that cannot be had.
  explicit OffDeviceState(const OffDeviceSetup& setup);
  // Nothing is under way afterwards, unless a disk hangs: what its requests use then stays to the process's
  // end.
  ~OffDeviceState();

  // Null where nothing of the pool passes through slots.
  Store* store(Pool pool) const { return stores_[static_cast<size_t>(pool)].get(); }
  // Pinned memory for the embedding's weights where the plan puts them there; else null.
  std::byte* embedding() const { return embedding_.data(); }
  // Pinned, for updates by the CPU beside a GPU; empty where there are none.
  std::span<std::byte> update_staging() const { return staging_.bytes(); }
  IoCounters counters() const;
  // That arrays have on disks, of the space that was reserved for them; 0 where nothing lives there.
  int64_t disk_bytes() const;
  // Lets copies between host memory and the device go on (Store::poll).
  void poll() const;
  // That disks and each way of the link to a GPU have been busy, and that compute has waited for them. On a
  // GPU as its clock has collected it.
  double busy_seconds() const;
  double wait_seconds() const;
  // Null on the CPU.
  DeviceClock* clock() const { return clock_.get(); }
  // After an error that ended a step: nothing is under way, and every array is as if it was never written.
  // Throws Error(21) where a disk hangs.
  void reset();
  bool hangs() const { return queue_ != nullptr && queue_->hangs(); }
  // For the log: engine, paths, what was chosen instead of what and why.
  const std::string& description() const { return description_; }

 private:
  void place_embedding(const PlacementPlan& placement);
  void open_memory(const OffDeviceSetup& setup, int64_t bytes);
  void open_disks(const OffDeviceSetup& setup, int64_t bytes);

  std::string description_, engine_note_;
  std::unique_ptr<DeviceClock> clock_;
  std::unique_ptr<SwapSpace> space_;
  std::unique_ptr<PinnedPool> pinned_;
  PinnedBlock staging_, embedding_;
  std::unique_ptr<IoQueue> queue_;
  std::array<std::unique_ptr<Store>, kPools> stores_;
};

}  // namespace lm
