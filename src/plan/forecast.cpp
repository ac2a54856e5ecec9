#include "plan/forecast.h"

#include <algorithm>

namespace lm {
namespace {

// Transfers run beside compute; the step takes as long as the list with its waits.
void predict_transfers(const PlanInput& in, const StepShape& shape, const StepCosts& costs,
                       const ComputeRates& rates, Plan& plan) {
  const TimelineShape timeline = plan.placement.timeline();
  if (!timeline.transfers.any() && !plan.placement.update_on_host) return;
  const ComputeRates host = compute_rates(in.machine, DeviceType::kCpu, plan.numerics.dtype);
  const auto seconds = [&](const Operation& op) {
    const double all = cost_seconds(costs.of(op), timeline.host_update(op).used ? host : rates);
    if (op.kind != OperationKind::kUpdate) return all;
    return all / static_cast<double>(plan.schedule.unit(op.unit).tiles());
  };
  plan.timeline = walk_timeline(plan.schedule, timeline, link_rates(in.machine, in.device), seconds);
  plan.step_seconds = plan.timeline.seconds;
  if (plan.placement.embedding_in_host == 0) return;
  // Rows that are looked up; all of it when it is updated: read and written.
  const auto row = static_cast<double>(in.spec.hidden) * static_cast<double>(dtype_size(plan.numerics.dtype));
  const auto updated =
      in.adapter != nullptr ? 0.0 : 2.0 * static_cast<double>(plan.placement.embedding_in_host);
  plan.timeline.link_bytes += shape.step_tokens * row + updated;
}

void add_links(Plan& plan, const LinkRates& rates) {
  const Timeline& t = plan.timeline;
  const auto add = [&](const char* name, double bytes, double rate) {
    if (bytes > 0) plan.links.push_back({name, bytes / rate, bytes, "B"});
  };
  add("disk read", t.disk_read_bytes, rates.disk_read);
  add("disk write", t.disk_written_bytes, rates.disk_write);
  add("GPU link", t.link_bytes, 2 * rates.link);
  if (t.host_seconds > 0) plan.links.push_back({"CPU update", t.host_seconds, 0, "B"});
  for (const LinkTime& link : plan.links) {
    const auto best = std::find_if(plan.links.begin(), plan.links.end(),
                                   [&](const LinkTime& other) { return other.name == plan.binding; });
    if (best == plan.links.end() || link.seconds > best->seconds) plan.binding = link.name;
  }
  if (rates.assumed && t.disk_read_bytes + t.disk_written_bytes > 0)
    plan.choices.push_back({"disk rates", "assumed", "no disk was measured: times are rough"});
}

}  // namespace

void forecast(const PlanInput& in, Plan& plan) {
  const NumericsPlan& n = plan.numerics;
  const bool lora = in.adapter != nullptr;
  const double longest = static_cast<double>(in.config.data.max_length);
  const double length = in.data.mean_length > 0 ? std::min(in.data.mean_length, longest) : longest;
  const double sequences = static_cast<double>(in.config.train.global_batch);
  const ComputeRates rates = compute_rates(in.machine, in.device, n.dtype);
  const StepShape shape{
      .pass = pass_shape(in, plan),
      .state_bytes = n.state().bytes(1),
      .micro = uniform_work(static_cast<double>(n.micro_batch) * length, length, in.data.target_share),
      .step_tokens = sequences * length};
  const StepCosts costs(shape);
  plan.schedule = plan.placement.schedule(in.spec, n.recompute, in.config.optimizer.clip, n.ranks);
  plan.schedule.micro_batches = n.micro_batches;
  plan.prediction = predict_step(costs, plan.schedule, rates);
  plan.step_seconds = plan.prediction.seconds;
  plan.step_tokens = shape.step_tokens;
  plan.sol_seconds_per_token =
      necessary_flops(in.spec, in.layout, lora, in.config.data.max_length) / rates.peak_flops;
  predict_transfers(in, shape, costs, rates, plan);
  const Prediction& p = plan.prediction;
  const double compute = p.gemm_seconds + p.attention_seconds;
  plan.links = {{"compute", compute, p.cost.gemm_flops + p.cost.attention_flops, "FLOP"},
                {"memory", p.memory_seconds, p.cost.bytes + p.cost.pass_bytes, "B"}};
  plan.binding = compute >= p.memory_seconds ? "compute" : "memory";
  add_links(plan, link_rates(in.machine, in.device));
  if (rates.assumed) {
    plan.choices.push_back({"rates", "assumed", "this machine was not measured: times are rough"});
  }
}

}  // namespace lm
