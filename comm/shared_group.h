// The ranks of one machine, over memory that all of them have mapped. Bytes pass through each rank's staging
// in rounds of half of it, so that one meeting per round is enough: who fills a half for the second time
// knows from the meeting between that everyone has emptied it. A thread of the group says now and then that
// its rank lives, so that who waits can tell one that is stopped from one that works.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/waited.h"
#include "comm/group.h"
#include "comm/shared_region.h"

namespace lm {

// When each rank of a region has last been seen to live. One thread's.
class SignsOfLife {
 public:
  explicit SignsOfLife(const SharedRegion& region, double silence);
  void look(double now);
  double silent_seconds(int rank, double now) const { return now - seen_[static_cast<size_t>(rank)]; }

 private:
  const SharedRegion& region_;
  const double silence_;
  double looked_ = 0;
  std::vector<uint64_t> beats_;
  std::vector<double> seen_;
};

class SharedGroup final : public Group {
 public:
  // `silence`: seconds without a sign of life after which a rank that others wait for is given up; `late`: of
  // one that lives and does not come. Borrows the region.
  SharedGroup(SharedRegion& region, int rank, double silence = kSilence, double late = kLate);
  ~SharedGroup() override;
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  static constexpr double kSilence = 60;
  static constexpr double kLate = 3600;  // longer than any load, preparation of data or save

  int rank() const override { return rank_; }
  int ranks() const override { return region_.ranks(); }
  void share_among(const Members& members, const char* what, std::byte* data,
                   std::span<const ByteRange> shards, int64_t longest) override;
  void exchange_among(const Members& members, const char* what, const std::byte* data,
                      std::span<const ByteRange> shards, int64_t longest, const Add& add) override;
  bool waits() const override { return !region_.all_arrived(meeting_.load(std::memory_order_relaxed)); }

  // For a thread that looks several times per second while this rank waits for others outside of this group:
  // what has become of them, in the operation that is named. It borrows the group.
  std::function<std::optional<Error>(const std::string& what)> watch() const;

 private:
  void meet(const char* what);
  void look_after(const char* what, uint64_t meeting);
  [[noreturn]] void give_up(const char* what, uint64_t meeting, int rank, double seconds) const;
  Error ended_error(const std::string& what) const;
  Error silent_error(const std::string& call, int rank, double seconds) const;
  void live();
  std::byte* half(int rank) const {
    return region_.staging(rank) + (round_ % 2 == 0 ? 0 : region_.staging_bytes() / 2);
  }

  SharedRegion& region_;
  const int rank_;
  const double silence_, late_;
  SignsOfLife signs_;
  Waited waited_;                      // in the meeting
  std::atomic<uint64_t> meeting_ = 0;  // the last that this rank has come to
  uint64_t round_ = 0;

  std::mutex mutex_;
  std::condition_variable leave_;
  bool leaving_ = false;
  std::thread alive_;
};

}  // namespace lm
