// The input of a layer: out(activation(gate x) * p), p being the layer's columns of what the embedding stage
// has made (spec/mixers/layer_input.h has the sizes).
#pragma once

#include "model/mixers/mixer.h"

namespace lm {

struct LayerInput {
  LayerInputSpec spec;
  int64_t layer = 0;  // whose columns it reads
  Linear gate;        // [P, H]
  Linear out;         // [H, P]

  static constexpr bool kKeptWithAttention = false;
  struct Saved {
    View gate_and_input;  // [T, 2P]; in backward its own gradient
    LinearSaved gate_adapters, out_adapters;
  };
  Saved allocate(const Context& context, int64_t rows) const;
  View forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
               const MixerOutput& output) const;
  void backward(const Context& context, const DeviceBatch& batch, MixerInput& input, const Saved& saved,
                const View& dy, bool first) const;

  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("input.gate", self.gate);
    visitor("input.out", self.out);
  }
};

}  // namespace lm
