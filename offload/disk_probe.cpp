#include "offload/disk_probe.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"
#include "offload/swap_space.h"

namespace lm {
namespace {

constexpr int64_t kBlock = kMiB;
constexpr int kWindow = 16;  // blocks in flight, each with its buffer
constexpr double kFillSeconds = 0.25, kMeasureSeconds = 0.25;

int64_t free_bytes(const std::string& directory) {
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0) return 0;  // the swap space will report the error
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

class Measurement {
 public:
  Measurement(IoQueue& queue, PinnedPool& pool, std::vector<Extent> extents)
      : queue_(queue), extents_(std::move(extents)) {
    for (int i = 0; i < kWindow; ++i) {
      buffers_.push_back(pool.lease(kBlock));
      std::memset(buffers_.back().data(), 0xA5, kBlock);  // a disk may be faster with zeros
    }
  }

  // Writes every extent once, as long as time allows. Drops unwritten extents: reading space that was only
  // reserved costs the disk nothing.
  void fill() {
    const double start = monotonic_seconds();
    size_t written = 0;
    for (; written < extents_.size() && (written < 2 || monotonic_seconds() - start < kFillSeconds);
         ++written)
      ask(written, written, false);
    finish();
    extents_.resize(written);
  }

  // Bytes per second of cycling over the extents; `reads` returns whether the n-th transfer is a read.
  template <class Reads>
  double rate(const Reads& reads) {
    const double start = monotonic_seconds();
    size_t asked = 0;
    // Reads and writes side by side go to different halves.
    const size_t half = extents_.size() / 2;
    for (; asked < kWindow || monotonic_seconds() - start < kMeasureSeconds; ++asked) {
      const size_t place = asked % 2 == 0 ? asked / 2 % half : half + asked / 2 % (extents_.size() - half);
      ask(asked, place, reads(asked));
    }
    finish();
    return static_cast<double>(asked) * kBlock / (monotonic_seconds() - start);
  }

  int64_t bytes() const { return static_cast<int64_t>(extents_.size()) * kBlock; }

 private:
  void ask(size_t number, size_t extent, bool read) {
    const size_t slot = number % kWindow;
    std::byte* const memory = buffers_[slot].data();
    queue_.wait(tickets_[slot]);
    tickets_[slot] = read ? queue_.read(extents_[extent], memory, kBlock, "the disk probe")
                          : queue_.write(extents_[extent], memory, kBlock, "the disk probe");
  }
  void finish() {
    queue_.drain();
    std::fill(std::begin(tickets_), std::end(tickets_), Ticket{0});
  }

  IoQueue& queue_;
  std::vector<Extent> extents_;
  std::vector<PinnedBlock> buffers_;
  Ticket tickets_[kWindow] = {};
};

}  // namespace

DiskProbe probe_disk(const std::string& directory, IoEngineKind engine, int64_t most_bytes) {
  DiskProbe probe;
  probe.free_bytes = free_bytes(directory);
  const int64_t blocks = std::max<int64_t>(2, std::min(most_bytes, probe.free_bytes / 4) / kBlock);
  SwapSpace space({{directory}}, blocks * kBlock);
  probe.direct = space.direct(0, &probe.direct_reason);
  probe.alignment = space.alignment();
  LM_CHECK(kBlock % probe.alignment == 0, fmt::format("an alignment of {}", probe.alignment));
  PinnedPool pool(DeviceType::kCpu, kWindow * kBlock, std::max(probe.alignment, PinnedPool::kAlignment));
  IoQueue queue(
      space,
      [&] {
        const std::span<std::byte> buffers[] = {pool.memory()};
        return make_engine(engine, {.files = space.files(), .buffers = buffers, .depth = kWindow},
                           &probe.note);
      },
      kBlock);
  probe.engine = queue.description();
  std::vector<Extent> extents;
  for (int64_t i = 0; i < blocks; ++i) extents.push_back(space.allocate(kBlock));
  Measurement measurement(queue, pool, std::move(extents));
  measurement.fill();
  probe.measured_bytes = measurement.bytes();
  probe.write_bytes_per_s = measurement.rate([](size_t) { return false; });
  probe.read_bytes_per_s = measurement.rate([](size_t) { return true; });
  probe.both_bytes_per_s = measurement.rate([](size_t i) { return i % 2 == 0; });
  return probe;
}

}  // namespace lm
