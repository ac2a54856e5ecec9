#include "plan/estimate.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>

#include "base/bytes.h"
#include "plan/flash_rate.h"
#include "plan/limits.h"
#include "plan/parallel_experts.h"
#include "plan/traffic.h"
#include "plan/update_work.h"
#include "plan/weight_rows.h"

namespace lm {
namespace {

// A step of many micro-batches is walked with a few of them, and with twice as many: each further one takes
// what those in between do. So the work does not grow with train.global_batch.
struct FewMicroBatches {
  StepConfig less, more;
  double times = 0;  // that the difference comes on top of `more`

  double extend(double of_less, double of_more) const { return of_more + times * (of_more - of_less); }
  Timeline extend(const Timeline& of_less, Timeline out) const {
    for (double Timeline::*field :
         {&Timeline::seconds, &Timeline::waiting_seconds, &Timeline::disk_read_bytes,
          &Timeline::disk_written_bytes, &Timeline::link_bytes, &Timeline::host_seconds})
      out.*field = extend(of_less.*field, out.*field);
    return out;
  }
  RankTraffic extend(const RankTraffic& of_less, RankTraffic out) const {
    const double between = extend(of_less.between_share * of_less.bytes(), out.between_share * out.bytes());
    out.calls =
        static_cast<int64_t>(extend(static_cast<double>(of_less.calls), static_cast<double>(out.calls)));
    for (double RankTraffic::*field :
         {&RankTraffic::gradient_bytes, &RankTraffic::weight_bytes, &RankTraffic::vote_bytes,
          &RankTraffic::seconds, &RankTraffic::inside_seconds, &RankTraffic::between_seconds})
      out.*field = extend(of_less.*field, out.*field);
    out.between_share = between / out.bytes();
    return out;
  }
};

std::optional<FewMicroBatches> few_micro_batches(const StepConfig& step) {
  constexpr int64_t kMostWalked = 8000, kOfMicroBatch = 4;  // operations; of each in every unit, at most
  const int64_t all = step.micro_batches, group = step.group >= all ? 1 : step.group;
  const int64_t each = group * kOfMicroBatch * std::ssize(step.units);
  const int64_t few = group * std::max<int64_t>(kMostWalked / 2 / each, 1);
  if (2 * few >= all) return std::nullopt;
  FewMicroBatches out{step, step, static_cast<double>(all - 2 * few) / static_cast<double>(few)};
  out.less.micro_batches = few;
  out.more.micro_batches = 2 * few;
  return out;
}

// `walk` gives a step's timeline, or its traffic.
template <class Walk>
auto walk_few(const StepConfig& step, const Walk& walk) {
  const std::optional<FewMicroBatches> few = few_micro_batches(step);
  return few ? few->extend(walk(few->less), walk(few->more)) : walk(step);
}

// Calls of all ranks, between the operations of the step: on the CPU nothing else happens while they last.
// (GPUs compute beside them, which the walk below knows.)
RankTraffic estimate_traffic(const PlanInput& in, const SizedPlan& plan, const StepConfig& counted) {
  if (in.world.ranks == 1) return {};
  const RankLinks links = rank_links(in.machine, in.device);
  const Traffic traffic(in.layout, plan.numerics, plan.placement, in.world);
  return walk_few(counted, [&](const StepConfig& step) {
    const StepSchedule list = step.uses_slots() ? steady_steps(step).back() : make_schedule(step);
    return traffic_of(traffic, list, in.world, links);
  });
}

// Between the steps, and so in no list.
double stop_vote_seconds(const PlanInput& in, const SizedPlan& plan) {
  if (in.world.ranks == 1) return 0;
  const Traffic traffic(in.layout, plan.numerics, plan.placement, in.world);
  double seconds = 0;
  for (const Collective& call : traffic.stop_vote())
    seconds += collective_time(call, in.world, rank_links(in.machine, in.device)).seconds();
  return seconds;
}

bool has_timeline(const SizedPlan& plan) {
  return plan.step.uses_slots() || plan.placement.update_on_host || plan.step.calls_beside();
}

// Transfers, and calls of ranks with GPUs, run beside compute; the step takes as long as the list with its
// waits.
Timeline estimate_transfers(const PlanInput& in, const SizedPlan& plan, const StepConfig& counted,
                            const StepCosts& costs, double step_tokens) {
  const TimelineShape shape = expected_timeline(in, plan);
  Timeline out = walk_few(counted, [&](const StepConfig& step) {
    return walk_timeline(step, shape, link_rates(in.machine, in.device), operation_seconds(in, plan, costs));
  });
  if (plan.placement.embedding_in_host == 0) return out;
  // Rows that are looked up, by a second forward once more, unless recomputation has kept them; all of it
  // when it is updated: read and written.
  const double tables = in.spec.embedding.positions > 0 ? 2 : 1;
  const double row =
      (tables * static_cast<double>(in.spec.hidden) + static_cast<double>(in.spec.embedding.inputs.all())) *
      static_cast<double>(dtype_size(plan.numerics.dtype));
  const bool frozen = in.layout.blocks.front().frozen_bytes > 0;
  const auto updated = frozen ? 0.0 : 2.0 * static_cast<double>(plan.placement.embedding_in_host);
  const double lookups = plan.step.two_pass_clip() && !plan.recompute().whole() ? 2 : 1;
  out.link_bytes += lookups * step_tokens / in.world.ranks * row + updated;
  return out;
}

// Of a first backward for the norm alone.
double norm_seconds(const StepConfig& step, const StepCosts& costs, const ComputeRates& rates,
                    double step_seconds) {
  if (!step.two_pass_clip()) return 0;
  StepConfig after = step;
  after.in_backward = false;
  return step_seconds - estimate_step(costs, after, rates).seconds;
}

double forward_seconds(const PlanCost& cost) {
  return cost.estimate.by_kind[static_cast<size_t>(OperationKind::kForward)];
}

std::vector<LinkTime> links_of(const PlanCost& cost, const LinkRates& rates) {
  const StepEstimate& p = cost.estimate;
  std::vector<LinkTime> out = {
      {"compute", p.gemm_seconds + p.attention_seconds, p.cost.gemm_flops + p.cost.attention_flops, "FLOP"},
      {"memory", p.memory_seconds, p.cost.bytes + p.cost.pass_bytes + p.cost.decoded_bytes, "B"}};
  const auto add = [&](const char* name, double seconds, double bytes) {
    if (seconds > 0) out.push_back({name, seconds, bytes, "B"});
  };
  const auto add_bytes = [&](const char* name, double bytes, double rate) {
    if (bytes > 0) add(name, bytes / rate, bytes);
  };
  const Timeline& t = cost.timeline;
  add_bytes("disk read", t.disk_read_bytes, rates.disk_read);
  add_bytes("disk write", t.disk_written_bytes, rates.disk_write);
  add_bytes("GPU link", t.link_bytes, 2 * rates.link);
  const RankTraffic& traffic = cost.traffic;
  add("between ranks", traffic.inside_seconds, traffic.bytes() * (1 - traffic.between_share));
  add("between machines", traffic.between_seconds, traffic.bytes() * traffic.between_share);
  add("CPU update", t.host_seconds, 0);
  return out;
}

// Of a step.
int64_t step_sequences(const PlanInput& in) {
  const int64_t most = in.config.train.global_batch;
  return in.data.sequences > 0 ? std::min(in.data.sequences, most) : most;
}

// Of a sequence, and of the documents in it.
struct Lengths {
  double sequence = 0, document = 0;
};

Lengths lengths(const PlanInput& in) {
  const auto longest = static_cast<double>(in.config.data.max_length);
  const double sequence = in.data.mean_length > 0 ? std::min(in.data.mean_length, longest) : longest;
  // A token is in a long document more often than in a short one, so this may be more than the mean sequence.
  const double document = in.data.document_length > 0 ? std::min(in.data.document_length, longest) : sequence;
  return {sequence, document};
}

}  // namespace

TimelineShape expected_timeline(const PlanInput& in, const SizedPlan& plan) {
  TimelineShape shape = plan.placement.timeline();
  std::vector<TimelineShape::Array>& weights = shape.arrays[static_cast<size_t>(Pool::kWeights)];
  for (int64_t layer = 0; layer < in.spec.layer_count() && !weights.empty(); ++layer) {
    const auto* const spec = in.spec.layer(layer).find<ExpertsSpec>();
    const int64_t unit = layer + 1;
    if (spec == nullptr || !routes_experts(plan, unit, *spec, in.layout.experts)) continue;
    const double tokens =
        static_cast<double>(plan.numerics.micro_batch * plan.step.group * in.layout.experts.ranks) *
        std::max(lengths(in).sequence, 1.0);
    const int64_t all = expert_bytes(in.layout.blocks[static_cast<size_t>(unit)]).frozen;
    TimelineShape::Array& array = weights[static_cast<size_t>(unit)];
    array.routed_share = expected_expert_share(*spec, tokens);
    array.routed = static_cast<int64_t>(array.routed_share * static_cast<double>(all));
    array.bytes += array.routed - all;
  }
  return shape;
}

StepShape step_shape(const PlanInput& in, const SizedPlan& plan) {
  const NumericsPlan& n = plan.numerics;
  const Lengths length = lengths(in);
  const double sequences = static_cast<double>(step_sequences(in));
  const auto size = [](DType type) { return static_cast<double>(dtype_size(type)); };
  // Sums of rows and columns take two more passes over the gradient and one over the weights; state counts
  // twice, read and written.
  StepConfig step = plan.step;
  step.weighted = in.data.weighted;
  const double sums = is_factored(n.rule) ? size(n.gradient_dtype) + size(n.trained_dtype()) / 2 : 0;
  const auto state = static_cast<double>(state_bytes(in.layout, n.state()));
  return {.model = in.model(),
          .step = std::move(step),
          .state_bytes = state / static_cast<double>(std::max<int64_t>(in.layout.flat_elements, 1)) + sums,
          .micro = uniform_work(static_cast<double>(n.micro_batch) * length.sequence, length.document,
                                in.data.target_share),
          .step_tokens = sequences * length.sequence,
          .rule = n.rule,
          .bf16_time = compute_rates(in.machine, in.device, n.dtype, n.products).gemm_flops /
                       compute_rates(in.machine, in.device, DType::kBF16).gemm_flops,
          .attention_rate = in.device == DeviceType::kCuda
                                ? flash_rate(in.machine.gpus.front(), n.dtype, in.config.run.deterministic)
                                : nullptr};
}

std::function<double(const Operation&)> compute_seconds(const PlanInput& in, const SizedPlan& plan,
                                                        const StepCosts& costs) {
  const ComputeRates rates =
                         compute_rates(in.machine, in.device, plan.numerics.dtype, plan.numerics.products),
                     host = compute_rates(in.machine, DeviceType::kCpu, plan.numerics.dtype);
  return [=, &costs, &plan, timeline = plan.placement.timeline()](const Operation& op) {
    if (is_transfer(op)) return 0.0;
    const double all = cost_seconds(costs.of(op), timeline.host_update(plan.step, op).used ? host : rates);
    const bool tile = op.kind == OperationKind::kUpdate;
    return tile ? all / static_cast<double>(plan.step.unit(op.unit).tiles()) : all;
  };
}

std::function<double(const Operation&)> operation_seconds(const PlanInput& in, const SizedPlan& plan,
                                                          const StepCosts& costs) {
  return [&in, compute = compute_seconds(in, plan, costs),
          traffic = Traffic(in.layout, plan.numerics, plan.placement, in.world),
          links = rank_links(in.machine, in.device)](const Operation& op) {
    double sum = compute(op);
    for (const Collective& call : traffic.of(op)) sum += collective_time(call, in.world, links).seconds();
    return sum;
  };
}

double tokens_per_second(const PlanCost& cost) {
  return cost.step_seconds > 0 ? cost.step_tokens / cost.step_seconds : 0;
}

int64_t step_micro_batches(const PlanInput& in, const NumericsPlan& numerics) {
  return std::min(numerics.micro_batches,
                  ceil_div(ceil_div(step_sequences(in), in.world.ranks), numerics.micro_batch));
}

PlanCost estimate(const PlanInput& in, const SizedPlan& plan) {
  StepConfig step = plan.step;
  step.micro_batches = step_micro_batches(in, plan.numerics);
  const ComputeRates rates =
      compute_rates(in.machine, in.device, plan.numerics.dtype, plan.numerics.products);
  const StepCosts costs(step_shape(in, plan));
  PlanCost out;
  out.estimate = estimate_step(costs, step, rates);
  out.norm_seconds = norm_seconds(step, costs, rates, out.estimate.seconds);
  out.step_tokens = static_cast<double>(step_sequences(in)) * lengths(in).sequence;
  out.sequence_tokens = in.data.mean_length > 0 ? lengths(in).sequence : 0;
  const StepWork token = uniform_work(1, lengths(in).document, in.data.target_share);
  out.peak_seconds_per_token = necessary_flops(in.spec, in.layout, token) / rates.peak_flops;
  out.traffic = estimate_traffic(in, plan, step);
  const double before = out.traffic.seconds;
  add_expert_traffic(in, plan, step, step_shape(in, plan).micro, out.traffic);
  out.step_seconds = out.estimate.seconds + out.traffic.seconds;
  if (has_timeline(plan)) {
    out.timeline = estimate_transfers(in, plan, step, costs, out.step_tokens);
    out.step_seconds = out.timeline.seconds + stop_vote_seconds(in, plan) + (out.traffic.seconds - before);
  }
  if (has_router_pass(in.config.train, in.spec, step)) out.step_seconds += forward_seconds(out);
  out.links = links_of(out, link_rates(in.machine, in.device));
  out.binding = std::ranges::max_element(out.links, {}, &LinkTime::seconds)->name;
  return out;
}

std::vector<Choice> explain_estimate(const PlanInput& in, const Plan& plan) {
  std::vector<Choice> out;
  if (plan.step.two_pass_clip())
    out.push_back({"backward for the norm", fmt::format("{:.3g} s", plan.norm_seconds),
                   "compute of every step that optimizer.clip = \"global\" costs with updates inside "
                   "backward; \"block\" and \"none\" do without"});
  const bool may_assume = in.device == DeviceType::kCuda || in.world.nodes > 1;
  if (in.world.ranks > 1 && may_assume && rank_links(in.machine, in.device).assumed)
    out.push_back({"links between ranks", "assumed",
                   "not measured: 22 GB/s from GPU to GPU where it has no "
                   "known NVLink, 45 GB/s from machine to machine"});
  if (std::optional<Choice> experts = explain_parallel_experts(in, plan)) out.push_back(*experts);
  if (const double coefficient = router_aux_loss(in.config.train, in.spec); coefficient != 0) {
    out.push_back({"train.router_aux_loss", fmt::format("{:g}", coefficient),
                   has_router_pass(in.config.train, in.spec, plan.step)
                       ? fmt::format("a forward pass more, {:.3g} s of each step: the first backward pass "
                                     "needs what all micro-batches choose",
                                     forward_seconds(plan))
                       : "what all micro-batches choose is known before the backward pass"});
  }
  if (link_rates(in.machine, in.device).assumed &&
      plan.timeline.disk_read_bytes + plan.timeline.disk_written_bytes > 0)
    out.push_back({"disk rates", "assumed", "no disk was measured: times are rough"});
  if (compute_rates(in.machine, in.device, plan.numerics.dtype, plan.numerics.products).assumed)
    out.push_back({"rates", "assumed", "this machine was not measured: times are rough"});
  return out;
}

}  // namespace lm
