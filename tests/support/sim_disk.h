// Disks in memory with planned faults and a throttle, for tests and benchmarks. The disk keeps its contents
// beyond an engine; engines on it are made and used like real ones, and ignore the files' descriptors. Data
// move when a request completes, not when it is handed in, so what overlaps wrongly is seen.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "offload/io_engine.h"

namespace lm {

enum class SimFault : uint8_t {
  kEio,        // the operation answers -EIO
  kEnospc,     // -ENOSPC
  kEintr,      // -EINTR
  kEagain,     // -EAGAIN
  kShort,      // a part moves, and is reported
  kZero,       // answers 0
  kLong,       // moves what was asked and reports more
  kDelay,      // completes 2 ms late
  kHang,       // never completes
  kDuplicate,  // is reported twice
  kUnknown,    // reports an id that nobody asked for
  // The silent ones, which only a checksum finds:
  kBitFlip,       // a read gives one wrong bit
  kDroppedWrite,  // a write is reported done and leaves the old bytes
  kStrayWrite,    // a write goes to another place of the same file, and leaves the old bytes in its own
  kStrayRead,     // a read gives another place's bytes
};

struct SimFaultAt {
  SimFault fault = SimFault::kEio;
  int64_t operation = 0;  // the disk's n-th, from 0, in the order handed in
  bool for_ever = false;  // that one and all later ones
  int file = -1;          // of this file alone; -1: of any
};

struct SimSetup {
  using Clock = std::chrono::steady_clock;

  std::vector<SimFaultAt> faults;
  uint64_t seed = 0;     // of the choices that faults leave open, and of `shuffle`
  bool shuffle = false;  // completions in random order
  int depth = 16;
  // Speeds of the emulated disk in bytes/s, 0 = no limit. `both` is what reads and writes share.
  double read_bytes_per_s = 0, write_bytes_per_s = 0, both_bytes_per_s = 0;
  // The disk's time, where a test moves it by hand; empty: the steady clock's. The I/O thread calls it.
  std::function<Clock::time_point()> now = {};
};

class SimDisk {
 public:
  // Zeroed files of these sizes.
  SimDisk(std::span<const IoFile> files, SimSetup setup = {});
  ~SimDisk();

  // The disk must outlive the engine; one engine at a time.
  std::unique_ptr<IoEngine> make_engine();

  // Replaces the faults; operations are counted from 0 again.
  void plan_faults(std::vector<SimFaultAt> faults);
  int64_t operations() const;  // handed in so far
  int64_t injected() const;    // of these met a fault
  // The contents, for tests that spoil them; no engine may be at work.
  std::span<std::byte> contents(int file);

 private:
  class Engine;
  struct Pending;
  using Clock = SimSetup::Clock;

  Clock::time_point now() const { return setup_.now ? setup_.now() : Clock::now(); }
  // Does what the request asks, as its fault has it; its answers are appended.
  void complete(const Pending& pending, std::vector<IoResult>& results);
  int64_t move(const Pending& pending);
  int64_t another_place(const IoRequest& request);
  Clock::time_point finish_time(const IoRequest& request);

  mutable std::mutex mutex_;  // guards all below
  SimSetup setup_;
  std::mt19937_64 random_;
  std::vector<std::vector<std::byte>> files_;
  int64_t operations_ = 0;
  int64_t injected_ = 0;
  Clock::time_point read_free_{}, write_free_{}, both_free_{};  // when each link has done what it was given
};

}  // namespace lm
