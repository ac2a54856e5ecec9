// Memory that the ranks of one machine share: a memfd that the CLI process (or a test) makes and its ranks
// inherit. It carries what a group moves, what each rank posts of itself, and that one of them has ended.
// Whoever has mapped it may call everything but `arrive` and `post_...`, which are the rank's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/staging.h"
#include "comm/liveness.h"

namespace lm {

class SharedRegion {
 public:
  // `staging`: bytes of each rank for what is on its way.
  static SharedRegion create(int ranks, int64_t staging = kStaging);
  static SharedRegion attach(int fd);  // Error(70) when it is none of this version
  SharedRegion(SharedRegion&& other) noexcept;
  SharedRegion& operator=(SharedRegion&&) = delete;
  ~SharedRegion();

  static constexpr int64_t kStaging = kRankStagingBytes;

  int fd() const { return fd_; }
  int ranks() const;
  int64_t staging_bytes() const;  // of each rank
  std::byte* staging(int rank) const;

  // A rank has ended: whoever waits for it, now or later, is told. Gives whether nobody had been told before.
  bool end();
  bool ended() const;

  // A rank comes to its next meeting, which `what` names; gives its number, from 1.
  uint64_t arrive(int rank, const char* what);
  // Whether all ranks have come to that meeting; waits for it until timeout_ms are over or a rank has ended.
  bool all_arrived(uint64_t meeting) const;
  bool wait(uint64_t meeting, int timeout_ms) const;

  // Heartbeat of a rank; progress of its GPU; what it has posted so far.
  void post_heartbeat(int rank);
  void post_device(int rank, const DeviceProgress& progress);
  Posted peek(int rank) const;

  // The last meeting that a rank has come to.
  struct Position {
    uint64_t meeting = 0;
    std::string what;
  };
  Position where(int rank) const;
  // What a rank has come for, to a meeting that all have come to and the caller is at: nobody can have come
  // to the one after the next.
  std::string name(int rank, uint64_t meeting) const;

 private:
  struct Place;
  struct Header;
  SharedRegion(int fd, std::byte* memory, int64_t bytes) : fd_(fd), memory_(memory), bytes_(bytes) {}
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Place& place(int rank) const;

  int fd_ = -1;
  std::byte* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace lm
