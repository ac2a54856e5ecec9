// What the routers of a step's micro-batches have done, and the loss that balances their load (Fedus et al.,
// "Switch Transformers"), as the reference computes it over all layers together:
//   E * sum over experts e of f_e P_e
// f_e: slots of e divided by rows (tokens of all layers), P_e: the mean of its probabilities over these rows.
// f is constant, so a row's gradient needs f of the whole step beside its own probabilities:
//   dlogits += coefficient * E / rows * p ⊙ (f - f · p)
// Whoever carries out a step therefore sees to it that all of its forward passes are counted, of all ranks,
// before the first backward pass (train/step_routers.cpp). Host memory; one thread. Without such a loss the
// sums are figures for the metrics.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/context.h"

namespace lm {

class Routers {
 public:
  // Of a model with experts.
  static bool any(const ModelSpec& spec);
  explicit Routers(const ModelSpec& spec);

  // A step begins, whose loss has `coefficient` times the balance; 0: it is left alone. Gradients are those
  // of `loss_scale` times the loss.
  void begin(double coefficient, double loss_scale);
  // Whether forward passes are counted from here on: each micro-batch's once, recomputation never.
  void count_forward(bool on) { counting_ = on; }

  // Of layer `layer`, whose router has made of `tokens` tokens these probabilities [rows, E] and choices.
  struct Routed {
    int64_t layer = 0, tokens = 0;
    const View& probability;
    const Routing& routing;
  };
  void forward(const Context& context, const Routed& routed);
  // Adds the balance's gradient to that of the logits [rows, E].
  void backward(const Context& context, const Routed& routed, const View& dlogits);

  // The sums of this rank; whoever has those of all ranks writes them there. Whole numbers but for
  // probabilities and entropies.
  std::span<double> sums() { return sums_; }
  // The sums are complete.
  void settle();
  bool settled() const { return settled_; }

  // Of a settled step.
  struct Figures {
    double balance = 0;     // the loss, without its coefficient: k if all experts have one load
    double most_load = 0;   // of the busiest expert over the mean of its layer, in the layer with the largest
    double least_load = 0;  // likewise the least busy one's
    double entropy = 0;  // of a token's probabilities, mean over tokens and layers; over ln E: 1 is uniform
  };
  Figures figures() const;

 private:
  // Of a layer: where its sums begin, [E] chosen, [E] probability, entropy.
  struct Layer {
    int64_t begin = -1, experts = 0, chosen = 0;
    bool scores = false;  // as CountRoutes has it
  };
  double rows() const;             // tokens of all layers
  std::vector<Layer> layers_;      // with experts
  std::vector<int64_t> of_layer_;  // of the model: its place in layers_, -1: it has none
  std::vector<double> sums_;
  std::vector<float> fraction_;  // f [E], once the sums are complete
  double coefficient_ = 0, loss_scale_ = 1;
  bool counting_ = false, settled_ = false;
};

}  // namespace lm
