// Whether the ranks of a run live and make progress: what decides that one is gone, late or stuck, and the
// words for it, whatever carries their bytes. A rank posts heartbeats and the collective that it has entered
// last; others peek at what it has posted, over shared memory (shared_region.h) or messages (mpi_worker.h).
//
// `now`: seconds of the monotonic clock. Time counts in looks, as in Waited: who was stopped itself does not
// take the others for silent. Liveness and StallTimer are one thread's; the functions are anybody's.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/waited.h"

namespace lm {

// A rank in messages: "rank 3 on node7", or "rank 3" where no host is given.
struct RankName {
  int rank = 0;  // -1: not known yet, and the host stands for it
  std::string host = {};
  std::string text() const;
};

// A collective in messages: "gradients" (collective 7). All ranks number theirs alike, from 1; 0: no number.
struct CollectiveName {
  std::string what;
  uint64_t number = 0;
  std::string text() const;
};

// How far a rank's GPU is among the collectives that were enqueued, which are numbered from 1.
struct DeviceProgress {
  uint64_t enqueued = 0, begun = 0, done = 0;
  bool inside() const { return begun > done; }
};

// The same for whoever watches over the rank.
struct DeviceStand {
  uint64_t passed = 0;     // grows with every collective that the GPU enters or completes
  bool inside = false;     // it is in a collective
  std::string where = {};  // what it does, in words that follow "its GPU"
};

// What a rank posts of itself.
struct Posted {
  uint64_t heartbeats = 0;   // so far
  CollectiveName last = {};  // that it has entered
  std::string host = {};
  DeviceProgress device = {};
};

// Another rank whose GPU has not entered the collective in which this one's is: the one furthest behind.
std::optional<int> awaited(const DeviceProgress& mine, std::span<const DeviceProgress> all);

// How long a progress counter has stood still.
class StallTimer {
 public:
  // `most`: the time between two looks counts up to this.
  explicit StallTimer(double now, double most = Waited::kMost) : most_(most), waited_(now, most) {}
  // Seconds since `progress` was another number, or since restart().
  double look(uint64_t progress, double now) {
    if (std::exchange(progress_, progress) != progress) restart(now);
    return waited_.look(now);
  }
  void restart(double now) { waited_ = Waited(now, most_); }

 private:
  double most_;
  Waited waited_;
  uint64_t progress_ = 0;
};

// Seconds.
struct Patience {
  double silence = 60;  // without a heartbeat, of a rank that others wait for
  double late = 3600;   // of one that lives and does not come; longer than any load or save
};

// The other ranks as one of them sees them.
class Liveness {
 public:
  Liveness(RankName self, int ranks, Patience patience, double now);

  // This rank has entered a collective.
  void enter(CollectiveName here, double now);
  const CollectiveName& here() const { return here_; }

  // Error(41) once a rank is given up: its heartbeat counter stands still, or it has not entered the
  // collective that this one is in.
  std::optional<Error> silent(int rank, const Posted& posted, double now);
  std::optional<Error> late(int rank, double now);

 private:
  RankName self_;
  Patience patience_;
  std::vector<StallTimer> heartbeats_;
  CollectiveName here_{"start"};
  Waited waited_;  // in it
};

// Error(40): a rank has ended, which has said itself why. `when`: "", or words that follow.
Error peer_ended(const RankName& self, const std::string& when);
// Error(41): ranks, of which it is not known which, have not entered a collective.
Error not_entered(const RankName& self, const std::string& who, const CollectiveName& here, double seconds);
// Error(41): a rank is stuck itself. `device`: words that follow "its GPU"; "" none.
Error no_progress(const RankName& self, const std::string& doing, double seconds, double allowed,
                  const std::string& device = "");

}  // namespace lm
