// How far a rank's GPU is among the collectives that its group has enqueued. The host runs ahead of the GPU,
// so where the compute thread stands does not tell a GPU that waits in a collective for another rank from one
// that never enters it. An event is recorded before and after each; a thread of the group asks for these
// (`look`), so that whoever watches over the rank calls neither CUDA nor NCCL. Ranks that share a region see
// one another's progress there; of ranks on other machines nothing is known.
//
// The group owns it and borrows the region. `begin` and `end` are the compute thread's, `look` the group's
// thread's; the others any thread's: they wait for no call of the driver.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "comm/liveness.h"
#include "comm/shared_region.h"

namespace lm {

class CollectiveTrace {
 public:
  // `region`: of all ranks; null where they share none.
  CollectiveTrace(DeviceType device, SharedRegion* region, int rank)
      : device_(device), region_(region), rank_(rank) {}

  // Around what one collective enqueues in `stream`.
  void begin(const char* what, StreamView stream);
  void end(StreamView stream);

  void look();

  DeviceProgress latest() const;
  // Whether the GPU is in a collective that others have not entered, as far as one knows of them.
  bool waits() const;
  DeviceStand stand() const;

 private:
  struct Enqueued {
    Event begun, done;
    std::string what;
    bool whole = false;  // `done` is recorded
  };
  std::vector<DeviceProgress> all() const;

  const DeviceType device_;
  SharedRegion* const region_;
  const int rank_;

  // Guards what follows, and is never held during a call of the driver, which may not return. An event is
  // recorded and asked for without it: the compute thread has the last one, the group's thread those before.
  mutable std::mutex mutex_;
  std::deque<Enqueued> open_;    // not known to be done, progress_.done + 1 the first
  std::vector<Enqueued> spare_;  // whose events can be recorded anew
  DeviceProgress progress_;
};

}  // namespace lm
