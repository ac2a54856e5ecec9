// What the routers of a step's micro-batches have done, and the loss that balances their load (Fedus et al.,
// "Switch Transformers"), as the reference computes it over all layers together:
//   E * sum over experts e of f_e P_e
// f_e: slots of e divided by rows (tokens of all layers), P_e: the mean of its probabilities over these rows.
// f is constant, so a row's gradient needs f of the whole step beside its own probabilities:
//   dlogits += coefficient * E / rows * p ⊙ (f - f · p)
// Whoever carries out a step therefore sees to it that all of its forward passes are counted, of all ranks,
// before the first backward pass (train/step_routers.cpp). Without such a loss the sums are figures for the
// metrics. One thread, which issues the stream's work. On the CPU sums are host memory; on a GPU they are its
// own, kernels add them up and read them, and the host waits for none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/arena.h"
#include "model/context.h"

namespace lm {

class Routers {
 public:
  // Of a model with experts.
  static bool any(const ModelSpec& spec);
  // On a GPU with place for the sums of `ranks`, of which this is `rank`.
  explicit Routers(const ModelSpec& spec, DeviceType device = DeviceType::kCpu, int ranks = 1, int rank = 0);
  // Device memory of those on a GPU.
  static int64_t device_bytes(const ModelSpec& spec, int ranks);

  // A step begins, whose loss has `coefficient` times the balance; 0: it is left alone. Gradients are those
  // of `loss_scale` times the loss.
  void begin(double coefficient, double loss_scale, StreamView stream = {});
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

  // On the CPU: the sums of this rank; whoever has those of all ranks writes them there. Whole numbers but
  // for probabilities and entropies.
  std::span<double> sums() { return sums_; }
  // The sums are complete.
  void settle();
  bool settled() const { return settled_; }
  // Of a settled step.
  RouterFigures figures() const;

  // On a GPU: of each rank its sums, in device memory, to be gathered.
  std::byte* sums_of_ranks() const { return memory_.data(); }
  int64_t bytes_of_rank() const { return sum_count() * static_cast<int64_t>(sizeof(double)); }
  // The sums of all ranks are there, or will be in stream order. `figures`: device memory, overwritten.
  void settle_on_device(const Context& context, RouterFigures* figures);

 private:
  // Of a layer: where its sums begin, [E] chosen, [E] probability, entropy.
  struct Layer {
    int64_t begin = -1, experts = 0, chosen = 0;
    bool scores = false;  // as CountRoutes has it
  };
  bool on_device() const { return memory_.size() > 0; }
  double* sums_here() { return on_device() ? device_.sums : sums_.data(); }  // of this rank
  int64_t sum_count() const { return std::ssize(layers_) * router_sums(layers_.front().experts); }
  double rows() const;             // tokens of all layers
  std::vector<Layer> layers_;      // with experts
  std::vector<int64_t> of_layer_;  // of the model: its place in layers_, -1: it has none
  Memory memory_;                  // on a GPU: of all ranks' sums, then what device_ points to
  struct OnDevice {
    int ranks = 1;
    double* sums = nullptr;     // of this rank
    double* partial = nullptr;  // CountRoutes has it
    float* fraction = nullptr;  // SettleRoutes
  } device_;
  std::vector<double> sums_;     // on the CPU
  std::vector<float> fraction_;  // f [E], once the sums are complete
  double coefficient_ = 0, loss_scale_ = 1;
  bool counting_ = false, settled_ = false;
};

}  // namespace lm
