#include "plan/tier_space.h"

#include <algorithm>
#include <limits>

namespace lm {

int64_t spend(const Budget& budget, int64_t capacity) {
  if (budget.share <= 0) return capacity > 0 ? std::min(budget.bytes, capacity) : budget.bytes;
  if (capacity <= 0) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(budget.share * static_cast<double>(capacity));
}

int64_t path_room(const OffloadConfig& offload, const Disk& disk) {
  if (!offload.disk_limit) return disk.free_bytes;
  if (disk.free_bytes <= 0) return offload.disk_limit->bytes;
  return spend(*offload.disk_limit, disk.free_bytes);
}

TierSpace tier_space(const PlanInput& in, TierId tier) {
  const OffloadConfig& offload = in.config.offload;
  switch (tier) {
    case TierId::kDevice: {
      if (in.device != DeviceType::kCuda) return {};
      const Gpu& gpu = in.machine.gpus.front();
      return {true, offload.device_memory, gpu.memory_bytes, gpu.free_bytes};
    }
    case TierId::kHost:
      return {true, offload.host_memory, in.machine.host_capacity(), in.machine.host_available};
    case TierId::kNvme:
      break;
  }
  // All paths together: what one has no room for goes to the others.
  int64_t room = 0;
  for (const Disk& disk : in.machine.disks) room += path_room(offload, disk);
  return {!offload.paths.empty(), {0, 1}, room, room};
}

}  // namespace lm
