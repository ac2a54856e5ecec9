// The ranks of one machine, over memory that all of them have mapped. Bytes pass through each rank's staging
// in rounds of half of it, so that one meeting per round is enough: who fills a half for the second time
// knows from the meeting between that everyone has emptied it. A thread of the group posts heartbeats, so
// that who waits can tell a rank that is stopped from one that works.
#pragma once

#include <atomic>
#include <optional>

#include "comm/group.h"
#include "comm/liveness.h"
#include "comm/periodic.h"
#include "comm/shared_region.h"

namespace lm {

class SharedGroup final : public Group {
 public:
  // `silence` and `late`: see Patience. Borrows the region.
  SharedGroup(SharedRegion& region, int rank, double silence = kSilence, double late = kLate);

  static constexpr double kSilence = Patience().silence, kLate = Patience().late;

  int rank() const override { return rank_; }
  int ranks() const override { return region_.ranks(); }
  void all_gather_among(const Members& members, const char* what, std::byte* data,
                        std::span<const ByteRange> shards, int64_t longest) override;
  void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t longest, const Add& add) override;
  bool waits() const override { return !region_.all_arrived(meeting_.load(std::memory_order_relaxed)); }

  // For a thread that looks several times per second while this rank waits for others outside of this group:
  // what has become of them, in the operation that is named. It borrows the group.
  std::function<std::optional<Error>(const std::string& what)> watch() const;

 private:
  void meet(const char* what);
  // Why a rank that has not come to the meeting is given up, in what `liveness` is in.
  std::optional<Error> lost(Liveness& liveness, uint64_t meeting) const;
  std::byte* half(int rank) const {
    return region_.staging(rank) + (round_ % 2 == 0 ? 0 : region_.staging_bytes() / 2);
  }

  SharedRegion& region_;
  const int rank_;
  const Patience patience_;
  Liveness liveness_;                  // the compute thread's
  std::atomic<uint64_t> meeting_ = 0;  // the last that this rank has come to
  uint64_t round_ = 0;
  Periodic heartbeat_;
};

}  // namespace lm
