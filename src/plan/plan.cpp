#include "plan/plan.h"

#include <algorithm>
#include <cstdio>

#include "base/bytes.h"
#include "plan/gemm_library.h"
#include "plan/placement.h"
#include "plan/refusal.h"
#include "plan/sizes.h"
#include "schedule/timeline.h"

namespace lm {
namespace {

// GEMMs gain nothing from more tokens at once, activations grow.
constexpr int64_t kCpuMicroTokens = 2048, kGpuMicroTokens = 16384;
// Fewer at once leave GEMMs so far below their rate that recomputing a third of the work is the cheaper
// choice.
constexpr int64_t kCpuEnoughTokens = 256, kGpuEnoughTokens = 2048;
// Rows of logits at once. Each chunk reads and writes the head's weight gradient once, so GPUs, where that
// costs as much as 500 rows of GEMM, take the most whose logits stay below 1/32 of their memory.
constexpr int64_t kCpuRowChunk = 512, kGpuRowChunk = 4096, kLeastRowChunk = 256;  // 512 x 49152 bf16: 48 MiB
constexpr int64_t kLogitsShare = 32;

// Divisors of the global batch, largest first.
std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> small, large;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    small.push_back(d);
    if (d != n / d) large.push_back(n / d);
  }
  std::reverse(small.begin(), small.end());
  large.insert(large.end(), small.begin(), small.end());
  return large;
}

std::vector<int64_t> micro_batch_candidates(const PlanInput& in) {
  if (in.config.train.micro_batch) return {*in.config.train.micro_batch};
  const int64_t most = in.device == DeviceType::kCpu ? kCpuMicroTokens : kGpuMicroTokens;
  std::vector<int64_t> out;
  for (const int64_t m : divisors(in.config.train.global_batch)) {
    if (m == 1 || m * in.config.data.max_length <= most) out.push_back(m);
  }
  return out;
}

// The largest candidate that fits under a policy; 0 when none does.
int64_t largest_micro_batch(const PlanInput& in, Plan plan, const HomeChoice& homes, bool recompute) {
  plan.numerics.recompute = recompute;
  for (const int64_t m : micro_batch_candidates(in)) {
    plan.numerics.micro_batch = m;
    place(in, homes, plan);
    if (fits_capacity(plan)) return m;
  }
  return 0;
}

void choose_micro_batch_and_recompute(const PlanInput& in, const HomeChoice& homes, Plan& plan) {
  const Recompute wanted = in.config.train.recompute;
  // Moving block inputs away is of use only where nothing else is saved.
  const bool moved = homes.activations != asked_home(OffloadHome::kNone, in.device);
  const int64_t none = wanted == Recompute::kBlock || moved ? 0 : largest_micro_batch(in, plan, homes, false);
  const int64_t block = wanted == Recompute::kNone ? 0 : largest_micro_batch(in, plan, homes, true);
  const int64_t enough = in.device == DeviceType::kCpu ? kCpuEnoughTokens : kGpuEnoughTokens;
  const bool keep = none > 0 && (none * in.config.data.max_length >= enough || none >= block);
  NumericsPlan& n = plan.numerics;
  n.recompute = wanted == Recompute::kBlock || (wanted == Recompute::kAuto && !keep);
  n.micro_batch = std::max(n.recompute ? block : none, micro_batch_candidates(in).back());
  if (wanted == Recompute::kAuto) {
    const std::string larger =
        "with saved activations only micro-batches of " + std::to_string(none) + " fit";
    plan.choices.push_back({"train.recompute", n.recompute ? "block" : "none",
                            keep       ? "saved activations fit"
                            : none > 0 ? larger
                                       : "saved activations would not fit"});
  }
}

std::string micro_batch_reason(const PlanInput& in) {
  const int64_t most = in.device == DeviceType::kCpu ? kCpuMicroTokens : kGpuMicroTokens;
  return "the most sequences that divide global_batch and fit, up to " + std::to_string(most) +
         " tokens at once";
}

void choose_io(const PlanInput& in, Plan& plan) {
  const IoConfig& io = in.config.io;
  plan.placement.engine = io.engine;
  if (io.block) plan.placement.io_block = io.block->bytes;
  if (io.depth) plan.placement.io_depth = static_cast<int>(*io.depth);
  plan.placement.verify = in.config.offload.verify;
}

int64_t choose_row_chunk(const PlanInput& in, DType dtype) {
  if (in.device == DeviceType::kCpu) return kCpuRowChunk;
  const int64_t capacity = in.machine.gpus.front().memory_bytes;
  const int64_t row = in.spec.vocab * static_cast<int64_t>(dtype_size(dtype));
  int64_t rows = kGpuRowChunk;
  while (capacity > 0 && rows > kLeastRowChunk && rows * row > capacity / kLogitsShare) rows /= 2;
  return rows;
}

void choose_threads(const PlanInput& in, Plan& plan) {
  NumericsPlan& n = plan.numerics;
  n.threads = static_cast<int>(in.config.run.threads.value_or(in.machine.cores));
  plan.placement.optimizer_threads = static_cast<int>(in.config.optimizer.threads.value_or(n.threads));
  if (!in.config.run.threads) {
    plan.choices.push_back({"run.threads", std::to_string(n.threads), "the cores this process may use"});
  }
  if (!in.config.optimizer.threads) {
    plan.choices.push_back(
        {"optimizer.threads", std::to_string(plan.placement.optimizer_threads), "as run.threads"});
  }
}

// What is streamed runs beside compute; the step takes as long as the list with its waits.
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

void predict(const PlanInput& in, Plan& plan) {
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
  plan.schedule = plan.placement.schedule(in.spec, n.recompute, in.config.optimizer.clip);
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

// With a GPU, state off it is updated by the CPU where it lies or passes through the GPU: whichever fits, and
// makes the shorter step. Spends spare memory either way.
void choose_update_site(const PlanInput& in, const HomeChoice& homes, int64_t most_group, Plan& plan) {
  const bool choice = in.device == DeviceType::kCuda && homes.optimizer != Home::kDevice;
  Plan on_host = plan;
  use_spare_memory(in, plan);
  if (!choice) return;
  on_host.placement.update_on_host = true;
  place(in, homes, on_host, most_group);
  if (!fits_memory(on_host)) return;
  use_spare_memory(in, on_host);
  if (!on_host.fits) return;
  if (!plan.fits && in.update_on_host.value_or(true)) {
    plan = on_host;
    return plan.choices.push_back({"update of state off the GPU", "cpu", "takes less room on the disk"});
  }
  Plan gpu = plan, cpu = on_host;
  predict(in, gpu);
  predict(in, cpu);
  const bool host = in.update_on_host.value_or(cpu.step_seconds < gpu.step_seconds);
  if (host) plan = on_host;
  char reason[96];
  std::snprintf(reason, sizeof reason, "%.3g s per step, %.3g s if the %s did it",
                host ? cpu.step_seconds : gpu.step_seconds, host ? gpu.step_seconds : cpu.step_seconds,
                host ? "GPU" : "CPU");
  plan.choices.push_back({"update of state off the GPU", host ? "cpu" : "gpu", reason});
}

// What fits in memory with whole classes off the device: now as much of them stays near as fits, and the rest
// is for the disk. Where that is too small, smaller groups leave fewer block inputs on it.
void spend_and_fit_disk(const PlanInput& in, const HomeChoice& homes, Plan& plan) {
  for (;;) {
    Plan spent = plan;
    choose_update_site(in, homes, plan.placement.group, spent);
    if (spent.fits || plan.placement.group == 1) {
      plan = std::move(spent);
      return;
    }
    place(in, homes, plan, ceil_div(plan.placement.group, 2));
  }
}

// The nearest homes in which the micro-batch fits the machine's capacities; then, the numerics fixed, the
// nearest homes whose memory fits what is free now.
void choose_homes(const PlanInput& in, Plan& plan) {
  const std::vector<HomeChoice> candidates = home_candidates(in);
  const Plan base = plan;
  size_t chosen = 0;
  for (; chosen < candidates.size(); ++chosen) {
    plan = base;
    choose_micro_batch_and_recompute(in, candidates[chosen], plan);
    place(in, candidates[chosen], plan);
    if (fits_capacity(plan)) break;
  }
  // From here on the numerics are fixed.
  chosen = std::min(chosen, candidates.size() - 1);
  for (; !fits_memory(plan) && chosen + 1 < candidates.size(); ++chosen)
    place(in, candidates[chosen + 1], plan);
  if (fits_memory(plan)) spend_and_fit_disk(in, candidates[chosen], plan);
  // What is left now may hold code, which is made again otherwise.
  Plan more = plan;
  more.placement.every_gemm_shape = true;
  size_plan(in, more);
  if (more.fits) plan = std::move(more);
  explain_homes(in, plan);
}

// A micro-batch decides how sums are split and so the result; where state lives, and how much memory it may
// take, must not. So the micro-batch is the machine's, whatever offload.* asks for; only where it does not
// fit what offload.* leaves is it chosen once more, and the plan says so.
void choose_numerics_and_homes(const PlanInput& in, Plan& plan) {
  if (in.config.train.micro_batch) return choose_homes(in, plan);
  const Plan base = plan;
  Config config = in.config;
  config.offload = {};
  config.offload.paths = in.config.offload.paths;
  PlanInput other{config, in.spec, in.adapter, in.layout, in.machine, in.device, in.data, in.update_on_host};
  choose_homes(other, plan);
  const int64_t micro_batch = plan.numerics.micro_batch;
  config.offload = in.config.offload;
  config.train.micro_batch = micro_batch;
  plan = base;
  choose_homes(other, plan);
  std::string reason = micro_batch_reason(in);
  if (!plan.fits) {
    Plan less = base;
    choose_homes(in, less);
    if (less.numerics.micro_batch != micro_batch) {
      reason = "what fits offload's limits; without them it would be " + std::to_string(micro_batch) +
               ", and losses differ in rounding: set it to keep results the same whatever the limits";
      plan = std::move(less);
    }
  }
  plan.choices.push_back({"train.micro_batch", std::to_string(plan.numerics.micro_batch), reason});
}

}  // namespace

Plan draft_plan(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
                const ModelLayout& layout, const Machine& machine, DeviceType device, const DataShape& data,
                std::optional<bool> update_on_host) {
  if (device == DeviceType::kCuda && machine.gpus.empty()) {
    throw Error(Exit::kDoesNotFit,
                {.area = "GPU-34",
                 .what = "the plan is for a GPU, and none is known",
                 .place = "",
                 .next = "--gpu-memory SIZE plans for an imagined one; --gpus 0 uses the CPU",
                 .kept = ""});
  }
  const PlanInput in{config, spec, adapter, layout, machine, device, data, update_on_host};
  Plan plan;
  NumericsPlan& n = plan.numerics;
  n.dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  n.gradient_dtype = config.train.gradients == GradientDType::kF32 ? DType::kF32 : DType::kBF16;
  n.master = config.optimizer.master;
  n.rule = config.optimizer.name;
  n.round_rows = rounds_rows(n.dtype, device);
  n.row_chunk = choose_row_chunk(in, n.dtype);
  plan.placement.device = device;
  choose_threads(in, plan);
  choose_io(in, plan);
  choose_numerics_and_homes(in, plan);
  predict(in, plan);
  return plan;
}

Plan make_plan(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
               const ModelLayout& layout, const Machine& machine, DeviceType device, const DataShape& data,
               std::optional<bool> update_on_host) {
  Plan plan = draft_plan(config, spec, adapter, layout, machine, device, data, update_on_host);
  if (!plan.fits)
    throw Error(
        Exit::kDoesNotFit,
        explain_refusal({config, spec, adapter, layout, machine, device, data, update_on_host}, plan));
  return plan;
}

}  // namespace lm
