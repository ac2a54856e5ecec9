#include "model/mixers/expert_routing.h"

#include <cmath>

#include "model/mixers/expert_products.h"
#include "model/routers.h"

namespace lm {
namespace {

RouteScores scores_of(const Experts& mixer) {
  const ExpertsSpec& spec = mixer.spec;
  if (!spec.corrected()) return {};
  return {.sigmoid = true,
          .correction = mixer.correction.values.floats(),
          .groups = spec.groups,
          .kept_groups = spec.kept_groups,
          .scale = static_cast<float>(spec.weight_scale)};
}

// What the router says of x, in the arena. Of two experts that are near each other a rounding of the logits
// chooses: where the reference has none there is none here, for a second copy of the router and of x.
View router_logits(const Context& context, const Experts& mixer, const DeviceBatch& batch, const View& x) {
  const bool wide = mixer.spec.wide_logits && context.dtype != DType::kF32;
  const View logits = context.tensor(x.rows, mixer.spec.experts, wide ? DType::kF32 : context.dtype);
  if (!wide) {
    LinearSaved none;
    linear_forward(context, mixer.router, batch, {.x = x, .y = logits}, none);
    return logits;
  }
  const ArenaFrame frame(context.arena);
  const auto widened = [&](const View& from) {
    const View to = context.tensor(from.rows, from.columns, DType::kF32);
    context.kernels.copy_rows({.from = from, .to = to}, context.stream);
    return to;
  };
  const View wide_x = widened(x), weight = widened(mixer.router.weight.weight);
  context.kernels.gemm({.a = wide_x, .b = weight, .out = logits, .transpose_b = true}, context.stream);
  return logits;
}

// x = x / sqrt(H): what a router reads of the residual stream, and its gradient.
void scale_router_input(const Context& context, const View& x) {
  const double factor = 1 / std::sqrt(static_cast<double>(x.columns));
  context.kernels.scale({.x = x, .out = x, .factor = static_cast<float>(factor)}, context.stream);
}
// What the router reads of the mixer's input x.
View read_by_router(const Context& context, const Experts& mixer, const View& x, const View& rstd) {
  if (!mixer.spec.reads_stream()) return x;
  const View out = context.like(x);
  norm_forward(context, mixer.router_norm, x, out, rstd);
  scale_router_input(context, out);
  return out;
}

// The factors of the router's weights in fp32, in the arena; null: it has none.
const float* factors_of(const Context& context, const Experts& mixer) {
  if (!mixer.spec.factors) return nullptr;
  const View& factors = mixer.factors.values.weight;
  const View out = context.tensor(1, factors.rows, DType::kF32);
  const View from = view_of(static_cast<std::byte*>(factors.data), factors.dtype, 1, factors.rows);
  context.kernels.copy_rows({.from = from, .to = out}, context.stream);
  return out.floats();
}

}  // namespace

bool pads_rows(const Context& context) {
  return context.round_rows && !multiplies_together(context);
}

View read_by_experts(const Context& context, const Experts& mixer, const View& x, const View& rstd) {
  if (!mixer.spec.reads_stream()) return x;
  const View out = context.like(x);
  norm_forward(context, mixer.input_norm, x, out, rstd);
  return out;
}
void route(const Context& context, const Experts& mixer, const DeviceBatch& batch, const View& x,
           const Experts::Saved& saved) {
  const ArenaFrame frame(context.arena);
  const View logits = router_logits(context, mixer, batch, read_by_router(context, mixer, x, {}));
  context.kernels.route_tokens({.logits = logits,
                                .probability = saved.probability.floats(),
                                .routing = saved.routing,
                                .tokens = batch.tokens,
                                .chosen = mixer.spec.chosen,
                                .renormalise = mixer.spec.renormalise,
                                .round = mixer.spec.round_weights,
                                .pad = pads_rows(context),
                                .scores = scores_of(mixer),
                                .factors = factors_of(context, mixer)},
                               context.stream);
  if (batch.routers != nullptr)
    batch.routers->forward(context, {mixer.layer, batch.tokens, saved.probability, saved.routing});
}

View logit_gradient(const Context& context, const Experts& mixer, const DeviceBatch& batch,
                    const Experts::Saved& saved, const View& dweight, bool first) {
  const ExpertsSpec& spec = mixer.spec;
  const View dlogits = context.tensor(batch.rows, spec.experts);
  const ArenaFrame frame(context.arena);
  const View& dfactors = mixer.factors.values.gradient;
  const View sums = dfactors.defined() ? context.tensor(1, spec.experts, DType::kF32) : View();
  if (spec.factors) {
    context.kernels.route_factors({.probability = saved.probability.floats(),
                                   .routing = saved.routing,
                                   .dweight = dweight.floats(),
                                   .factors = factors_of(context, mixer),
                                   .gradient = sums.floats(),
                                   .tokens = batch.tokens,
                                   .chosen = spec.chosen,
                                   .experts = spec.experts,
                                   .renormalise = spec.renormalise},
                                  context.stream);
  }
  if (dfactors.defined()) add_vector_gradient(context, dfactors, sums.floats(), first);
  context.kernels.route_backward({.probability = saved.probability.floats(),
                                  .routing = saved.routing,
                                  .dweight = dweight.floats(),
                                  .dlogits = dlogits,
                                  .tokens = batch.tokens,
                                  .chosen = spec.chosen,
                                  .renormalise = spec.renormalise,
                                  .scores = scores_of(mixer)},
                                 context.stream);
  if (batch.routers != nullptr)
    batch.routers->backward(context, {mixer.layer, batch.tokens, saved.probability, saved.routing}, dlogits);
  return dlogits;
}

void router_backward(const Context& context, const Experts& mixer, const DeviceBatch& batch,
                     const RouterBackward& pass, bool first) {
  const auto& [x, dlogits, dx] = pass;
  if (!mixer.spec.reads_stream())
    return linear_backward(context, mixer.router, batch, {.x = x, .dy = dlogits, .dx = dx}, {}, first);
  const ArenaFrame frame(context.arena);
  const View rstd = context.tensor(x.rows, 1, DType::kF32);
  const View read = read_by_router(context, mixer, x, rstd);
  const bool wanted = dx.defined() || mixer.router_norm.weight.gradient.defined();
  const View dread = wanted ? context.like(x) : View();
  linear_backward(context, mixer.router, batch, {.x = read, .dy = dlogits, .dx = dread}, {}, first);
  if (!wanted) return;
  scale_router_input(context, dread);
  norm_backward(context, mixer.router_norm,
                {.dy = dread, .x = x, .rstd = rstd, .dresidual = dx, .dx = dx.defined() ? dx : dread}, first);
}

}  // namespace lm
