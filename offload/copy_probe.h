// Measures the bandwidth of the link between pinned host memory and the current device, and of host memory
// itself, in about half a second, with the pool, streams and copies that training uses. On the CPU the copies
// are memcpy. Any one thread calls it.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/dtype.h"

namespace lm {

struct CopyProbe {
  double to_device_bytes_per_s = 0;
  double to_host_bytes_per_s = 0;
  double both_bytes_per_s = 0;  // both directions at once, both counted
  bool pinned = false;          // false: CUDA refused, and copies are staged through its own buffers
  std::string pinned_reason;    // why not

  // The bandwidth of one direction while both are busy, as they are in a step.
  double each_way() const { return both_bytes_per_s / 2; }
};

// Uses 2 * `bytes` of host memory and as much of the device's. Throws Error(30 or 31) where there is no room.
CopyProbe probe_copies(DeviceType device, int64_t bytes = 64 * kMiB, double seconds_each = 0.1);

// Bytes per second that this many threads read and write in host memory, both counted: the bandwidth of an
// update on the CPU. Takes a tenth of a second and 2 x `bytes`, which should exceed the caches.
double probe_host_memory(int threads, int64_t bytes = 128 * kMiB);

}  // namespace lm
