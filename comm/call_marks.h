// How far a rank's GPU is among the calls that its group has enqueued. The host runs ahead of the GPU, so
// where the compute thread stands does not tell a GPU that waits in a call for another rank from one that
// never comes to it; marks do. Calls are counted from 1, alike on all ranks, and an event is recorded before
// and after each. A thread of the group asks for these (`look`), so that whoever watches over the rank calls
// neither CUDA nor NCCL. Ranks that share a region see one another's marks there; of ranks on other machines
// nothing is known.
//
// The group owns it and borrows the region. `begin` and `end` are the compute thread's, `look` the group's
// thread's; the others any thread's: they wait for no call of the driver.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "comm/call_mark.h"
#include "comm/shared_region.h"

namespace lm {

// Another rank whose GPU has not come to the call in which this one's is: the one that is furthest behind.
std::optional<int> awaited(const CallMark& mine, std::span<const CallMark> all);

class CallMarks {
 public:
  // `region`: of all ranks; null where they share none.
  CallMarks(DeviceType device, SharedRegion* region, int rank);

  // Around what one call enqueues in `stream`.
  void begin(const char* what, StreamView stream);
  void end(StreamView stream);

  void look();

  CallMark latest() const;
  // Whether the GPU is in a call to which others have not come, as far as one knows of them.
  bool waits() const;
  DeviceStand stand() const;

 private:
  struct Call {
    Event begun, done;
    std::string what;
    bool enqueued = false;  // whole: `done` is recorded
  };
  Call* under_way(size_t i);
  std::vector<CallMark> all() const;

  const DeviceType device_;
  SharedRegion* const region_;
  const int rank_;

  // Guards what follows, and is never held during a call of the driver, which may not return. An event is
  // recorded and asked for without it: the compute thread has the last call, the group's thread those before.
  mutable std::mutex mutex_;
  std::deque<Call> calls_;   // that are not known to be done, mark_.done + 1 the first
  std::vector<Call> spare_;  // whose events can be recorded anew
  CallMark mark_;
};

}  // namespace lm
