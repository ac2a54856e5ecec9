// The products of all experts with their rows in a few launches, where the device has kernels for that
// (multiply_experts, expert_gradients): only the device knows which rows are whose. Frozen matrices that are
// quantized are dequantized in the arena, as many at a time as fit into a tile (model/linear.h), and of
// experts that come by routing those that are there.
//
// Experts' pairs of low rank are products of the same kernels, of 2 r rows' worth of a matrix: s A x of all
// rows, then y += B of it. What a pair reduces is not kept from forward to backward (expert_adapters.h).
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

  // y = x (W + s B A)ᵀ + bias of each expert's rows.
  void forward(const View& x, const View& y) const;
  // dx = dy (W + s B A).
  void input_gradient(const View& dy, const View& dx) const;
  // The gradients of what is trained (+)=: of W dyᵀ x, of biases the sums of dy, of B dyᵀ (s A x) and of A
  // (s dy B)ᵀ x; `first`: overwritten. And dx, which may be undefined.
  void backward(const LinearBackward& pass, bool first) const;
  // y += bias; without biases nothing.
  void add_biases(const View& y) const;

 private:
  // Of an expert: its matrix, or a half of its pair.
  using Half = Param Adapter::*;  // null: the matrix
  const Linear& linear(int64_t expert) const { return experts[static_cast<size_t>(expert)].*matrix; }
  bool there(int64_t expert) const { return fetch == nullptr || fetch->there(layer, expert); }
  const Param& param(int64_t expert, Half half) const;
  const Adapter* pair() const;
  View of_launch(const View& rows, int64_t first, int64_t count) const;
  // What all launches have in common.
  void multiply(const MultiplyExperts& product, Half half) const;
  void gradients(const ExpertGradients& of_all, Half half) const;
  int64_t place_weights(int64_t first, Half half, MultiplyExperts& product) const;
  void bias_gradients(const View& dy, bool first) const;
  View typed(const View& x) const;
  View reduced(const View& x) const;
  View dreduced(const View& dy) const;
  void add(const View& reduced, Half half, const View& sum) const;
};

}  // namespace lm
