// The MLP without a gate: down(activation(up x)) (spec/mixers/plain_mlp.h has its sizes).
#pragma once

#include "model/mixers/mixer.h"

namespace lm {

struct PlainMlp {
  PlainMlpSpec spec;
  Linear up;    // [F, H]
  Linear down;  // [H, F]

  static constexpr bool kKeptWithAttention = false;
  struct Saved {
    View up;  // [T, F]; in backward its own gradient
    LinearSaved up_adapters, down_adapters;
  };
  Saved allocate(const Context& context, int64_t rows) const;
  View forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
               const MixerOutput& output) const;
  void backward(const Context& context, const DeviceBatch& batch, MixerInput& input, const Saved& saved,
                const View& dy, bool first) const;

  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("mlp.up", self.up);
    visitor("mlp.down", self.down);
  }
};

}  // namespace lm
