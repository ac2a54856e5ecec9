// The products of all experts with their rows in a few launches, where the device has kernels for that
// (multiply_experts, expert_gradients): only the device knows which rows are whose. Frozen matrices that are
// quantized are dequantized in the arena, as many at a time as fit into a tile (model/linear.h), and of
// experts that come by routing those that are there. Experts have no adapters.
#pragma once

#include "model/mixers/experts.h"

namespace lm {

// Whether the device does; else each expert's rows are a product of their own, and known to the host.
inline bool multiplies_together(const Context& context) {
  return context.kernels.multiply_experts != nullptr;
}

// A matrix of each expert, with the rows that they are multiplied with.
struct GroupedProducts {
  const Context& context;
  const std::vector<Experts::Expert>& experts;
  Linear Experts::Expert::*matrix;  // gate_up or down
  const int32_t* start;             // Routing::start
  const ExpertFetch* fetch;         // Experts::fetch
  int64_t layer;

  // y = x Wᵀ + bias of each expert's rows.
  void forward(const View& x, const View& y) const;
  // dx = dy W.
  void input_gradient(const View& dy, const View& dx) const;
  // The gradients of those that are trained (+)= dyᵀ x, of biases the sums of dy; `first`: overwritten.
  void weight_gradients(const View& dy, const View& x, bool first) const;
  // y += bias; without biases nothing.
  void add_biases(const View& y) const;

 private:
  const Linear& linear(int64_t expert) const { return experts[static_cast<size_t>(expert)].*matrix; }
  bool there(int64_t expert) const { return fetch == nullptr || fetch->there(layer, expert); }
  void multiply(const View& x, const View& out, bool columns) const;
  int64_t place_weights(int64_t first, MultiplyExperts& product) const;
  void bias_gradients(const View& dy, bool first) const;
};

}  // namespace lm
