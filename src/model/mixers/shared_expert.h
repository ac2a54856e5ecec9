// The expert that every token meets: (sigmoid(g x) *) down(activation(gate x) * up x)
// (spec/mixers/shared_expert.h has its sizes). A token's factor multiplies what `down` reads, not what it
// writes: the result is the same, the output goes straight into the residual stream, and the factor's
// gradient, <dout, down h> = <downᵀ dout, h>, needs no output.
#pragma once

#include "model/mixers/mixer.h"

namespace lm {

struct SharedExpert {
  SharedExpertSpec spec;
  Linear gate_up;  // [2S, H]
  Linear down;     // [H, S]
  Linear weight;   // [1, H]; unbound where it is not gated

  static constexpr bool kKeptWithAttention = false;
  struct Saved {
    View gate_up;  // [T, 2S]; in backward its own gradient
    View weight;   // [T, 1], before the sigmoid
    LinearSaved gate_up_adapters, down_adapters;
  };
  Saved allocate(const Context& context, int64_t rows) const;
  View forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
               const MixerOutput& output) const;
  void backward(const Context& context, const DeviceBatch& batch, MixerInput& input, const Saved& saved,
                const View& dy, bool first) const;

  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("shared.gate_up", self.gate_up);
    visitor("shared.down", self.down);
    if (self.spec.gated) visitor("shared.weight", self.weight);
  }
};

}  // namespace lm
