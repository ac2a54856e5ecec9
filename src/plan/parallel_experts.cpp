#include "plan/parallel_experts.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "base/error.h"
#include "config/config_text.h"
#include "model/expert_exchange.h"
#include "plan/cost_model.h"
#include "plan/limits.h"
#include "plan/sizes.h"
#include "plan/traffic.h"
#include "plan/weight_rows.h"

namespace lm {
namespace {

constexpr const char* kReplicate = "leave zero.experts out: every rank then has all experts";

Error parallel_error(const std::string& what, const std::string& next = kReplicate) {
  return setting_error("zero.experts = \"parallel\": " + what, "zero.experts", next);
}

template <class Body>
void each_mixture(const ModelSpec& spec, const Body& body) {
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    if (const auto* const experts = spec.layer(i).find<ExpertsSpec>()) body(i, *experts);
  }
}

// A call of `count` that all ranks make at once.
void add_calls(const Collective& call, double count, const World& world, const RankLinks& links,
               RankTraffic& traffic) {
  const double bytes = call.mean_sent(world.ranks) * count,
               between = traffic.bytes() * traffic.between_share + bytes * call.between_share(world);
  const CollectiveTime time = collective_time(call, world, links);
  traffic.expert_bytes += bytes;
  traffic.between_share = traffic.bytes() > 0 ? between / traffic.bytes() : 0;
  traffic.seconds += time.seconds() * count;
  traffic.inside_seconds += time.inside * count;
  traffic.between_seconds += time.between * count;
  traffic.calls += std::llround(count);
}

}  // namespace

ExpertShare expert_share(const Config& config, const World& world, int rank) {
  if (config.zero.experts == ZeroExperts::kReplicated) return {};
  return {world.ranks, rank};
}

bool divides_experts(const ModelSpec& spec, int ranks) {
  bool any = false, all = true;
  each_mixture(spec, [&](int64_t, const ExpertsSpec& experts) {
    any = true, all = all && experts.experts % ranks == 0;
  });
  return any && all;
}

void refuse_parallel_experts(const PlanInputs& in, const World& world) {
  if (in.config.zero.experts == ZeroExperts::kReplicated) return;
  int64_t experts = 0;
  each_mixture(in.spec, [&](int64_t, const ExpertsSpec& spec) { experts = spec.experts; });
  if (experts == 0)
    throw parallel_error("a model of type " + in.spec.model_type + " has no experts",
                         "leave zero.experts out");
  if (in.adapter == nullptr)
    throw parallel_error("train.method = \"full\" writes a whole model, and no rank has all experts",
                         "set train.method = \"lora\" or \"qlora\", or leave zero.experts out");
  const OffloadTier weights = in.config.offload.weights;
  if (in.config.zero.stage == 3 && weights != OffloadTier::kAuto && weights != OffloadTier::kNone)
    throw parallel_error(
        "with zero.stage = 3 and offload.weights = " + value_text(weights) +
            " shards would leave memory, and a rank's experts, which are in none, would stay",
        "set zero.stage = 2 or less: each rank's experts are then offloaded with the rest");
  if (!divides_experts(in.spec, world.ranks))
    throw parallel_error(
        fmt::format("{} ranks do not divide {} experts equally", world.ranks, experts),
        fmt::format("start a number of ranks that divides {}, or leave zero.experts out", experts));
}

int64_t expert_exchange_bytes(const ModelSpec& spec, const ExpertShare& share, DType dtype) {
  return share.parallel() ? expert_round_bytes(share.ranks, spec.hidden * size_of(dtype)) : 0;
}

void add_expert_traffic(const PlanInput& in, const SizedPlan& plan, const StepConfig& step,
                        const StepWork& micro, RankTraffic& traffic) {
  const World& world = in.world;
  if (!in.layout.experts.parallel()) return;
  const RankLinks links = rank_links(in.machine, in.device);
  const int64_t trained = in.layout.first_trained();
  const auto micro_batches = static_cast<double>(step.micro_batches);
  const int64_t hidden = in.spec.hidden * size_of(plan.numerics.dtype);
  const double forward = has_router_pass(in.config.train, in.spec, step) ? 2 : 1;
  each_mixture(in.spec, [&](int64_t layer, const ExpertsSpec& spec) {
    const double backward = layer + 1 < trained ? 0 : step.two_pass_clip() ? 2 : 1;
    const auto rows = static_cast<int64_t>(
        std::ceil(micro.tokens * static_cast<double>(spec.chosen) / static_cast<double>(world.ranks)));
    const auto move = [&](int64_t row_bytes, double times) {
      const int64_t room = expert_exchange_bytes(in.spec, in.layout.experts, plan.numerics.dtype) /
                           world.ranks / row_bytes,
                    rounds = ceil_div(rows, room);
      const int64_t shard = ceil_div(rows, rounds) * row_bytes;
      add_calls({.reduce_scatter = true, .bytes = shard * world.ranks, .shard = shard},
                times * static_cast<double>(rounds) * micro_batches, world, links, traffic);
    };
    // There and back; and for a backward pass what the experts have read and what comes from above there,
    // with the weights, and two gradients back.
    move(hidden, 2 * forward + 3 * backward);
    if (backward > 0) move(sizeof(float), 2 * backward);
    const bool again = step.recompute.of(layer + 1) != Recompute::kNone;
    const auto counts = static_cast<int64_t>(static_cast<size_t>(spec.experts + 1) * sizeof(int32_t));
    add_calls({.bytes = counts * world.ranks, .shard = counts},
              (forward + (again ? backward : 0)) * micro_batches, world, links, traffic);
  });
}

std::optional<Choice> explain_parallel_experts(const PlanInput& in, const Plan& plan) {
  const ExpertShare& share = in.layout.experts;
  if (!share.parallel()) return {};
  int64_t each = 0, bytes = 0;
  each_mixture(in.spec, [&](int64_t layer, const ExpertsSpec& spec) {
    each = share.each(spec.experts);
    bytes += expert_bytes(in.layout.blocks[static_cast<size_t>(layer) + 1]).frozen;
  });
  return Choice{"zero.experts", "parallel",
                fmt::format("each rank keeps {} experts of a layer, {} of {}, and sends {} of rows in a step",
                            each, format_bytes(bytes), format_bytes(bytes * share.ranks),
                            format_bytes(std::llround(plan.traffic.expert_bytes)))};
}

}  // namespace lm
