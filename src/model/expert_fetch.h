// Where a block's experts may be off the device: who fetches those that the router has chosen. A step
// implements it (train/routed_experts.h); a dry run, and a block whose experts are all there, have none.
// Called by the rank's compute thread.
#pragma once

#include <cstdint>

namespace lm {

class ExpertFetch {
 public:
  // When this returns, work enqueued on the compute stream sees the weights of every expert of the layer that
  // has rows: expert e those from start[e] up to start[e + 1] (Routing::start, on the device). The unit is on
  // loan. May wait on the host.
  virtual void bring(int64_t layer, const int32_t* start) = 0;

 protected:
  ~ExpertFetch() = default;
};

}  // namespace lm
