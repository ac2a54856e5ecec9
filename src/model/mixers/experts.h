// A mixture of experts: the sum over a token's chosen experts i of w_i down_i(activation(gate_i x) * up_i x)
// (spec/mixers/experts.h has the sizes, kernels/expert_arguments.h how tokens are routed).
//
// Tokens are gathered into T k rows sorted by expert, so that each expert's are one range and its products
// are the ordinary ones of a linear layer (plain or quantized weights). Memory for them does not depend on
// the router. An expert without rows costs nothing; its gradient is exactly zero, and written: the optimizer
// goes on with its state, and its weights need not be there (model/expert_fetch.h). Experts' adapters are in
// mixers/expert_adapters.h.
//
// Recomputation routes again, with the same bits: the same logits of the same kernels, in whatever number of
// threads. Weights are applied to an expert's output in forward; in backward to the gradient of what `down`
// reads, so that the gradient of a weight, <dout, down h> = <downᵀ dout, h>, needs no output of an expert.
// Where experts have biases they are applied to dout instead, after downᵀ: the biases' gradients want that.
//
// Where ranks keep some experts each (ExpertExchange), the rows go to their owners and back, and the rest is
// done where the tokens are: routing, weights and the sum over a token's experts, in the same order. Owners
// keep nothing from forward to backward: these rows would be as many as the routers of other ranks say. They
// multiply by gate_up once more, of rows that come again.
#pragma once

#include <vector>

#include "model/expert_exchange.h"
#include "model/expert_fetch.h"
#include "model/mixers/mixer.h"

namespace lm {

// Numbers that are trained and multiply something of a mixer.
struct Factors {
  Param values;
};

struct Experts {
  struct Expert {
    Linear gate_up;  // [2I, H]
    Linear down;     // [H, I]
  };
  ExpertsSpec spec;
  int64_t layer = 0;
  Linear router;      // [E, H]
  Buffer correction;  // [E], of sigmoid scores
  // What reads the residual stream does so by these, and the router then times 1 / sqrt(H).
  Norm input_norm, router_norm;
  Factors factors;  // [E], of the weights
  std::vector<Expert> experts;
  // What fetches the experts that have rows, before their weights are read; null: all are there. The weights
  // of others may be anything then, and no product may depend on them; quantized ones are not dequantized.
  ExpertFetch* fetch = nullptr;
  // Where other ranks keep some of the experts, which are unbound here; null: all are here.
  ExpertExchange* exchange = nullptr;

  static constexpr bool kKeptWithAttention = false;
  struct Saved {
    Routing routing;
    View probability;           // [T, E] fp32; of sigmoid scores these
    View gate_up;               // [T k, 2I], of a clamped GLU interleaved; in backward its own gradient
    int64_t brought = 0;        // what `fetch` has returned for these tokens
    int32_t* starts = nullptr;  // with `exchange`, in place of gate_up: [ranks, E + 1] of each rank
  };
  Saved allocate(const Context& context, int64_t rows) const;
  View forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
               const MixerOutput& output) const;
  void backward(const Context& context, const DeviceBatch& batch, MixerInput& input, const Saved& saved,
                const View& dy, bool first) const;

  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("experts.router", self.router);
    if (self.spec.corrected()) visitor("experts.correction", self.correction);
    if (self.spec.reads_stream()) {
      visitor("experts.input_norm", self.input_norm);
      visitor("experts.router_norm", self.router_norm);
    }
    if (self.spec.factors) visitor("experts.factors", self.factors);
    for (size_t e = 0; e < self.experts.size(); ++e) {
      visitor(expert_name(e, "gate_up").c_str(), self.experts[e].gate_up);
      visitor(expert_name(e, "down").c_str(), self.experts[e].down);
    }
  }
};

}  // namespace lm
