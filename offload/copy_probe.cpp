#include "offload/copy_probe.h"

#include <cstring>

#include "base/arena.h"
#include "base/clock.h"
#include "base/cuda.h"
#include "base/parallel.h"
#include "offload/pinned.h"

namespace lm {
namespace {

// Copies in flight: the link must never wait for the host.
constexpr int kQueued = 4;

// A host and a device block, and the stream between them.
struct Way {
  Way(DeviceType device, PinnedPool& pool, int64_t bytes)
      : host(pool.lease(bytes)), on_device(device, bytes), stream(device) {}
  void up() const { copy_bytes(on_device.data(), host.data(), host.size(), stream.view()); }
  void down() const { copy_bytes(host.data(), on_device.data(), host.size(), stream.view()); }

  PinnedBlock host;
  Memory on_device;
  Stream stream;
};

// Bytes per second of rounds that move `bytes` each and are done when they return.
template <class Round>
double rate(int64_t bytes, double seconds, const Round& round) {
  round();  // the first use of pages and of the copy engine
  const double start = monotonic_seconds();
  double taken = 0;
  int64_t moved = 0;
  do {
    round();
    moved += bytes;
    taken = monotonic_seconds() - start;
  } while (taken < seconds);
  return static_cast<double>(moved) / taken;
}

}  // namespace

CopyProbe probe_copies(DeviceType device, int64_t bytes, double seconds_each) {
  PinnedPool pool(device, 2 * round_up(bytes, PinnedPool::kAlignment));
  const Way first(device, pool, bytes), second(device, pool, bytes);
  CopyProbe out;
  out.pinned = pool.registered(&out.pinned_reason);
  out.to_device_bytes_per_s = rate(kQueued * bytes, seconds_each, [&] {
    for (int i = 0; i < kQueued; ++i) first.up();
    first.stream.synchronize();
  });
  out.to_host_bytes_per_s = rate(kQueued * bytes, seconds_each, [&] {
    for (int i = 0; i < kQueued; ++i) second.down();
    second.stream.synchronize();
  });
  out.both_bytes_per_s = rate(2 * kQueued * bytes, seconds_each, [&] {
    for (int i = 0; i < kQueued; ++i) {
      first.up();
      second.down();
    }
    first.stream.synchronize();
    second.stream.synchronize();
  });
  return out;
}

double probe_host_memory(int threads, int64_t bytes) {
  constexpr int64_t kAtOnce = 1 * kMiB;
  const int64_t whole = round_up(bytes, kAtOnce);
  const Memory from(DeviceType::kCpu, whole), to(DeviceType::kCpu, whole);
  std::memset(from.data(), 1, static_cast<size_t>(whole));  // pages of their own, not the one of zeros
  return rate(2 * whole, 0.1, [&] {
    parallel_for(threads, whole / kAtOnce, 1, [&](int64_t begin, int64_t end) {
      std::memcpy(to.data() + begin * kAtOnce, from.data() + begin * kAtOnce,
                  static_cast<size_t>((end - begin) * kAtOnce));
    });
  });
}

}  // namespace lm
