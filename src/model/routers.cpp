#include "model/routers.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace lm {

bool Routers::any(const ModelSpec& spec) {
  return std::ranges::any_of(spec.layers,
                             [](const LayerSpec& layer) { return layer.find<ExpertsSpec>() != nullptr; });
}

int64_t Routers::device_bytes(const ModelSpec& spec, int ranks) {
  int64_t layers = 0, experts = 0;
  for (const LayerSpec& layer : spec.layers) {
    if (const auto* const of = layer.find<ExpertsSpec>()) ++layers, experts = of->experts;
  }
  const auto size = static_cast<int64_t>(sizeof(double));
  return (ranks * layers * router_sums(experts) + kRouteChunks * 2 * experts) * size +
         experts * static_cast<int64_t>(sizeof(float));
}

Routers::Routers(const ModelSpec& spec, DeviceType device, int ranks, int rank) {
  for (const LayerSpec& layer : spec.layers) {
    const auto* const experts = layer.find<ExpertsSpec>();
    of_layer_.push_back(experts == nullptr ? -1 : std::ssize(layers_));
    if (experts == nullptr) continue;
    layers_.push_back({.begin = std::ssize(layers_) * router_sums(experts->experts),
                       .experts = experts->experts,
                       .chosen = experts->chosen,
                       .scores = experts->scores == RouterScores::kSigmoid});
    LM_CHECK(experts->experts == layers_.front().experts && experts->chosen == layers_.front().chosen,
             "layers with different numbers of experts");
  }
  LM_CHECK(!layers_.empty(), "routers of a model without experts");
  const int64_t experts = layers_.front().experts;
  if (device == DeviceType::kCpu) {
    sums_.resize(static_cast<size_t>(sum_count()));
    fraction_.resize(static_cast<size_t>(experts));
    return;
  }
  memory_ = Memory(device, device_bytes(spec, ranks));
  auto* const all = reinterpret_cast<double*>(memory_.data());
  device_ = {.ranks = ranks, .sums = all + rank * sum_count(), .partial = all + ranks * sum_count()};
  device_.fraction = reinterpret_cast<float*>(device_.partial + kRouteChunks * 2 * experts);
}

void Routers::begin(double coefficient, double loss_scale, StreamView stream) {
  std::ranges::fill(sums_, 0);
  if (on_device()) zero_bytes(reinterpret_cast<std::byte*>(device_.sums), bytes_of_rank(), stream);
  coefficient_ = coefficient;
  loss_scale_ = loss_scale;
  counting_ = settled_ = false;
}

void Routers::forward(const Context& context, const Routed& routed) {
  if (!counting_) return;
  const Layer& layer = layers_[static_cast<size_t>(of_layer_[static_cast<size_t>(routed.layer)])];
  double* const sums = sums_here() + layer.begin;
  context.kernels.count_routes(
      {.probability = routed.probability.row_range(0, routed.tokens),
       .expert = routed.routing.expert,
       .chosen = layer.chosen,
       .sums = {.chosen = sums, .probability = sums + layer.experts, .entropy = sums + 2 * layer.experts},
       .scores = layer.scores,
       .start = routed.routing.start,
       .partial = device_.partial},
      context.stream);
}

void Routers::backward(const Context& context, const Routed& routed, const View& dlogits) {
  if (coefficient_ == 0) return;
  LM_CHECK(settled_, "a router's backward pass before all forward passes are counted");
  // A GPU's fractions are divided by the rows, which the host does not know there.
  const double count = on_device() ? 1 : rows();
  if (count == 0) return;
  context.kernels.balance_routes({.probability = routed.probability.floats(),
                                  .fraction = on_device() ? device_.fraction : fraction_.data(),
                                  .dlogits = dlogits,
                                  .tokens = routed.tokens,
                                  .factor = static_cast<float>(loss_scale_ * coefficient_ *
                                                               static_cast<double>(dlogits.columns) / count)},
                                 context.stream);
}

void Routers::settle_on_device(const Context& context, RouterFigures* figures) {
  counting_ = false;
  settled_ = true;
  const int64_t experts = layers_.front().experts;
  context.kernels.settle_routes({.sums = reinterpret_cast<const double*>(memory_.data()),
                                 .ranks = device_.ranks,
                                 .layers = std::ssize(layers_),
                                 .experts = experts,
                                 .chosen = layers_.front().chosen,
                                 .each = router_sums(experts),
                                 .entropy_unit = experts > 1 ? std::log(static_cast<double>(experts)) : 1.0,
                                 .fraction = device_.fraction,
                                 .figures = figures},
                                context.stream);
}

double Routers::rows() const {
  double out = 0;
  for (const Layer& layer : layers_) {
    const double* const chosen = sums_.data() + layer.begin;
    for (int64_t e = 0; e < layer.experts; ++e) out += chosen[e] / static_cast<double>(layer.chosen);
  }
  return out;
}

void Routers::settle() {
  counting_ = false;
  settled_ = true;
  const double count = rows();
  for (size_t e = 0; e < fraction_.size(); ++e) {
    double chosen = 0;
    for (const Layer& layer : layers_) chosen += sums_[static_cast<size_t>(layer.begin) + e];
    fraction_[e] = count > 0 ? static_cast<float>(chosen / count) : 0.0F;
  }
}

RouterFigures Routers::figures() const {
  const double count = rows();
  if (count == 0) return {};
  RouterFigures out{.least_load = INFINITY};
  const auto experts = static_cast<double>(fraction_.size());
  for (size_t e = 0; e < fraction_.size(); ++e) {
    double probability = 0, chosen = 0;
    for (const Layer& layer : layers_) {
      const double* const sums = sums_.data() + layer.begin;
      chosen += sums[e];
      probability += sums[fraction_.size() + e];
    }
    out.balance += experts * chosen / count * probability / count;
  }
  for (const Layer& layer : layers_) {
    const double* const sums = sums_.data() + layer.begin;
    double all = 0;
    for (int64_t e = 0; e < layer.experts; ++e) all += sums[e];
    for (int64_t e = 0; e < layer.experts && all > 0; ++e) {
      out.most_load = std::max(out.most_load, sums[e] * experts / all);
      out.least_load = std::min(out.least_load, sums[e] * experts / all);
    }
    out.entropy += sums[2 * layer.experts] / count;
  }
  out.entropy = experts > 1 ? out.entropy / std::log(experts) : 0.0;
  return out;
}

}  // namespace lm
