// Where a block's experts may be off the device: who fetches those that the router has chosen. A step
// implements it (train/routed_experts.h); a dry run, and a block whose experts are all there, have none.
// Called by the rank's compute thread.
#pragma once

#include <cstdint>
#include <span>

namespace lm {

class ExpertFetch {
 public:
  // When this returns, work enqueued on the compute stream sees the weights of every expert of the layer that
  // has rows: expert e those from start[e] up to start[e + 1] (Routing::start, on the device). The unit is on
  // loan. May wait on the host.
  //
  // `brought`: what this has returned for an earlier pass of the same tokens through the layer, which choose
  // the same experts again (backward those of forward or recomputation); 0: there was none. Unless the unit
  // has been fetched again since, these are there, and nobody waits. Other tokens, and so another micro-batch
  // while the unit stays on loan, choose others: of theirs what is missing is brought.
  virtual int64_t bring(int64_t layer, const int32_t* start, int64_t brought) = 0;
  // The same of experts that ranks divide, for the rows of all ranks' tokens: rows [ranks, E], on the host.
  virtual int64_t bring_for_ranks(int64_t layer, std::span<const int32_t> rows, int64_t brought) = 0;
  // Whether the expert's weights are there: brought since the unit's fetch, for whatever tokens. Of others
  // the bytes are anything.
  virtual bool there(int64_t layer, int64_t expert) const = 0;

 protected:
  ~ExpertFetch() = default;
};

}  // namespace lm
