// Inverted dropout, as torch's: x * keep / (1 - p). A mask is a function of its key and of each element's
// example, position and feature, so that backward and recomputation draw it again: nothing is stored.
#pragma once

#include "model/context.h"

namespace lm {

struct DropoutMask {
  float p = 0;
  uint64_t key = 0;  // of this step and tensor
  bool on() const { return p > 0; }
};

// out = drop(x), of the batch's tokens; the rows behind them become zero. out may be x.
void drop(const Context& context, const DropoutMask& mask, const DeviceBatch& batch, const View& x,
          const View& out);
// out += drop(x).
void add_dropped(const Context& context, const DropoutMask& mask, const DeviceBatch& batch, const View& x,
                 const View& out);

}  // namespace lm
