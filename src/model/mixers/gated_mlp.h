// The gated MLP: down(activation(gate x) * up x), gate and up as one product (spec/mixers/gated_mlp.h has its
// sizes).
#pragma once

#include "model/mixers/mixer.h"

namespace lm {

struct GatedMlp {
  GatedMlpSpec spec;
  Linear gate_up;  // [2F, H]
  Linear down;     // [H, F]

  static constexpr bool kKeptWithAttention = false;
  struct Saved {
    View gate_up;  // [T, 2F]; in backward its own gradient
    LinearSaved gate_up_adapters, down_adapters;
  };
  Saved allocate(const Context& context, int64_t rows) const;
  View forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
               const MixerOutput& output) const;
  void backward(const Context& context, const DeviceBatch& batch, MixerInput& input, const Saved& saved,
                const View& dy, bool first) const;

  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("mlp.gate_up", self.gate_up);
    visitor("mlp.down", self.down);
  }
};

}  // namespace lm
