#include "plan/numerics.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "config/config_names.h"
#include "plan/adapter_limits.h"
#include "plan/device_reserve.h"
#include "plan/gemm_library.h"
#include "plan/limits.h"
#include "plan/nominal_time.h"
#include "plan/parallel_experts.h"
#include "plan/placement.h"

namespace lm {
namespace {

// GEMMs gain nothing from more tokens at once, activations grow.
constexpr int64_t kCpuMicroTokens = 2048, kGpuMicroTokens = 16384;
// Fewer at once leave the CPU's GEMMs so far below their rate that recomputing a third of the work is the
// cheaper choice.
constexpr int64_t kCpuEnoughTokens = 256;
// Rows of logits at once. Each chunk reads and writes the head's weight gradient once, so GPUs, where that
// costs as much as 500 rows of GEMM, take the most whose logits stay below 1/32 of their memory.
constexpr int64_t kCpuRowChunk = 512, kGpuRowChunk = 4096, kLeastRowChunk = 256;  // 512 x 49152 bf16: 48 MiB
constexpr int64_t kLogitsShare = 32;

// Sequences of a step that a rank computes, at most.
int64_t rank_batch(const PlanInput& in) {
  return ceil_div(in.config.train.global_batch, in.world.ranks);
}

// Largest first.
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
  for (const int64_t m : divisors(rank_batch(in))) {
    if (m == 1 || m * in.config.data.max_length <= most) out.push_back(m);
  }
  return out;
}

// With what follows from it.
NumericsPlan with_micro_batch(const PlanInput& in, int64_t sequences, NumericsPlan n) {
  n.micro_batch = sequences;
  n.micro_batches = ceil_div(rank_batch(in), sequences);
  if (in.device == DeviceType::kCuda)
    n.documents_at_once = documents_at_once(sequences * in.config.data.max_length);
  return n;
}

bool can_have(const PlanInput& in, const NumericsPlan& numerics, const TierChoice& tier_choice) {
  return fits_capacity(place(in, {numerics, {}, {}}, tier_choice));
}

// The largest candidate that fits under a policy; 0 when none does.
int64_t largest_micro_batch(const PlanInput& in, NumericsPlan numerics, const TierChoice& tier_choice,
                            RecomputeChoice recompute) {
  numerics.recompute = recompute;
  const std::vector<int64_t> candidates = micro_batch_candidates(in);
  if (candidates.size() > 1 && !has_room_for_one(in, numerics, tier_choice, candidates.back())) return 0;
  const auto found = std::ranges::find_if(
      candidates, [&](int64_t m) { return can_have(in, with_micro_batch(in, m, numerics), tier_choice); });
  return found == candidates.end() ? 0 : *found;
}

// Whether micro-batches of `none` sequences whose activations are saved are faster than those of `block`
// whose blocks are recomputed; 0: they do not fit.
bool saving_is_faster(const PlanInput& in, int64_t none, int64_t block) {
  if (none == 0) return false;
  if (none >= block) return true;
  const int64_t length = in.config.data.max_length;
  if (in.device == DeviceType::kCpu) return none * length >= kCpuEnoughTokens;
  return nominal_product_seconds(in, none * length, false) <=
         nominal_product_seconds(in, block * length, true);
}

// `base`: all numerics but micro-batch and recomputation.
ChosenNumerics choose_micro_batch_and_recompute(const PlanInput& in, const TierChoice& tier_choice,
                                                const NumericsPlan& base) {
  LM_CHECK(in.config.train.global_batch > 0, "a step has sequences");
  const int64_t least = micro_batch_candidates(in).back();
  NumericsPlan n = base;
  if (!in.config.train.recompute.chosen_by_plan()) {
    n.recompute = in.config.train.recompute;
    const int64_t largest = largest_micro_batch(in, n, tier_choice, n.recompute);
    return {with_micro_batch(in, std::max(largest, least), n)};
  }
  // Where activations are off the device, the micro-batch is the one that fits if all but block inputs is
  // recomputed. Whether more is kept there is a matter of time (recompute_level.h).
  const bool off_device = tier_choice.activations != nearest_tier(in.device);
  const int64_t none = off_device ? 0 : largest_micro_batch(in, n, tier_choice, Recompute::kNone);
  const int64_t block = largest_micro_batch(in, n, tier_choice, Recompute::kBlock);
  const bool keep = saving_is_faster(in, none, block);
  n.recompute = keep ? Recompute::kNone : Recompute::kBlock;
  const std::string larger = fmt::format("with saved activations only micro-batches of {} fit", none);
  return {with_micro_batch(in, std::max(keep ? none : block, least), n),
          {{"train.recompute", recompute_name(n.recompute),
            keep       ? "saved activations fit"
            : none > 0 ? larger
                       : "saved activations would not fit"}}};
}

std::string micro_batch_reason(const PlanInput& in) {
  const int64_t most = in.device == DeviceType::kCpu ? kCpuMicroTokens : kGpuMicroTokens;
  return fmt::format("the most sequences that divide global_batch and fit, up to {} tokens at once", most);
}

int64_t choose_row_chunk(const PlanInput& in, DType dtype) {
  if (in.device == DeviceType::kCpu) return kCpuRowChunk;
  const int64_t capacity = in.machine.gpus.front().memory_bytes;
  const int64_t row = in.spec.head_rows() * size_of(dtype);
  int64_t rows = kGpuRowChunk;
  while (capacity > 0 && rows > kLeastRowChunk && rows * row > capacity / kLogitsShare) rows /= 2;
  return rows;
}

// Everything but micro-batch and recomputation.
NumericsPlan settled(const PlanInput& in) {
  const Config& config = in.config;
  NumericsPlan n;
  n.dtype = storage_type(config.model.dtype);
  n.fp32_adapters = n.dtype != DType::kF32 && has_fp32_adapters(config);
  if (in.device == DeviceType::kCuda) n.products = config.model.products;
  n.gradient_dtype = config.train.gradients == GradientDType::kF32 ? DType::kF32 : DType::kBF16;
  n.master = has_no_master(config.optimizer.name) ? Master::kNone : config.optimizer.master;
  n.rule = config.optimizer.name;
  n.stateless = is_stateless(config.optimizer.name, config.optimizer.rule);
  n.round_rows = rounds_rows(n.dtype, in.device, in.machine);
  n.row_chunk = choose_row_chunk(in, n.dtype);
  n.threads = static_cast<int>(config.run.threads.value_or(in.machine.cores));
  n.kernel_set = kernel_set(in.machine, in.device);
  n.libraries = in.machine.libraries;
  n.ranks = in.world.ranks;
  // One machine's ranks are all of them: the same order as one by one.
  if (in.world.nodes > 1 && in.world.by_machine) n.machine_ranks = in.world.ranks_per_node();
  return n;
}

// Micro-batch and recomputation for the nearest tiers in which some fit the machine's capacities.
ChosenNumerics nearest_that_fits(const PlanInput& in, const NumericsPlan& base) {
  ChosenNumerics out;
  for (const TierChoice& tier_choice : tier_candidates(in)) {
    out = choose_micro_batch_and_recompute(in, tier_choice, base);
    if (can_have(in, out.numerics, tier_choice)) break;
  }
  return out;
}

ChosenNumerics choose_batches(const PlanInput& in, const NumericsPlan& base) {
  if (in.config.train.micro_batch) return nearest_that_fits(in, base);
  Config config = in.config;
  config.offload = {};
  config.offload.paths = in.config.offload.paths;
  config.train.update = UpdateTime::kAuto;
  ChosenNumerics out = nearest_that_fits(in.with(config), base);
  std::string reason = micro_batch_reason(in);
  if (config.offload != in.config.offload || config.train.update != in.config.train.update) {
    const int64_t micro_batch = out.numerics.micro_batch;
    config = in.config;
    config.train.micro_batch = micro_batch;
    const PlanInput fixed = in.with(config);
    out = nearest_that_fits(fixed, base);
    ChosenNumerics less = nearest_that_fits(in, base);
    if (less.numerics.micro_batch != micro_batch && !choose_placement(fixed, out.numerics).fits) {
      reason = fmt::format(
          "what fits offload's limits; without them it would be {}, and losses differ in rounding: set it to "
          "keep results the same whatever the limits",
          micro_batch);
      out = std::move(less);
    }
  }
  out.choices.push_back({"train.micro_batch", std::to_string(out.numerics.micro_batch), reason});
  return out;
}

// What the configuration says itself was compared with the run's, and holds where it differs (--override);
// what it leaves open is as it was recorded.
ChosenNumerics adopted(const PlanInput& in) {
  const NumericsPlan &recorded = *in.recorded, now = settled(in);
  const Config& config = in.config;
  ChosenNumerics out{recorded};
  NumericsPlan& n = out.numerics;
  std::vector<Choice>& choices = out.choices;
  if (recorded.dtype != now.dtype) n.row_chunk = now.row_chunk, n.round_rows = now.round_rows;
  n.dtype = now.dtype;
  n.fp32_adapters = now.fp32_adapters;
  n.products = now.products;
  n.gradient_dtype = now.gradient_dtype;
  if (config.run.threads) n.threads = now.threads;
  n.master = now.master;
  n.rule = now.rule;
  n.stateless = now.stateless;
  n.ranks = now.ranks;
  if (recorded.ranks != now.ranks) n.machine_ranks = now.machine_ranks;
  if (!config.train.recompute.chosen_by_plan()) n.recompute = config.train.recompute;
  n = with_micro_batch(in, config.train.micro_batch.value_or(recorded.micro_batch), n);
  const auto choose = [&](const char* key, bool automatic, const std::string& value) {
    if (automatic) choices.push_back({key, value, "as this run has recorded"});
  };
  choose("run.threads", !config.run.threads, std::to_string(n.threads));
  choose("train.recompute", config.train.recompute.chosen_by_plan(), recompute_name(n.recompute));
  choose("train.micro_batch", !config.train.micro_batch, std::to_string(n.micro_batch));
  if (recorded.ranks != now.ranks)
    choices.push_back(
        {"ranks", std::to_string(now.ranks),
         fmt::format("this run began with {}, and losses differ in rounding from those", recorded.ranks)});
  if (n.machine_ranks != now.machine_ranks)
    choices.push_back(
        {"ranks of a machine", std::to_string(n.machine_ranks),
         "as this run has recorded: gradients of so many are added up first, wherever they are"});
  if (n.kernel_set != now.kernel_set)
    choices.push_back({"kernels", now.kernel_set,
                       "this run began with " + n.kernel_set + ", and losses differ in rounding from those"});
  // A plan of the CLI process knows no versions.
  if (!n.libraries.empty() && !now.libraries.empty() && n.libraries != now.libraries)
    choices.push_back(
        {"libraries", now.libraries,
         "this run began with " + n.libraries + ", and losses may differ in rounding from those"});
  return out;
}

// What the optimizer's settings mean here.
std::vector<Choice> explain_optimizer(const PlanInput& in) {
  const OptimizerConfig& optimizer = in.config.optimizer;
  std::vector<Choice> choices;
  if (in.trains() && scales_loss(in.config))
    choices.push_back({"optimizer.master", optimizer.master == Master::kNone ? "none" : "fp32",
                       trains_fp32(in.config)              ? "the adapters are fp32"
                       : optimizer.master == Master::kNone ? "fp16 weights are rounded stochastically"
                                                           : "of fp16 weights: 2 B per parameter more than "
                                                             "the split master of bf16 weights"});
  if (optimizer.written.empty()) return choices;
  const bool paged = optimizer.written.find("aged") != std::string::npos;
  choices.push_back(
      {"optimizer.name", rule_text(optimizer.name).name,
       "what " + optimizer.written + " is called here" +
           (paged ? "; its state leaves the device where offload.optimizer says, \"auto\": as much "
                    "as does not fit"
                  : "")});
  return choices;
}

// Cards before 8.0 multiply fp16 and fp32, and no bf16.
void refuse_bf16(const PlanInput& in) {
  if (in.device != DeviceType::kCuda || in.machine.gpus.empty()) return;
  const Gpu& gpu = in.machine.gpus.front();
  if (!gpu.capability.known() || gpu.capability.major >= 8) return;
  const Config& config = in.config;
  const bool model = config.model.dtype == ModelDType::kBF16;
  const bool rule = in.trains() && is_muon(config.optimizer.name);
  if (!model && !rule) return;
  throw Error(
      Exit::kDoesNotFit,
      {.area = "GPU-34",
       .what = gpu.name + " has compute capability " + gpu.capability.text() +
               ", a card without bf16, which " +
               (model ? "model.dtype = \"bf16\"" : "the products of optimizer.name = \"muon\"") + " needs",
       .place = "",
       .next = model ? "set model.dtype = \"fp16\", or --gpus 0 for the CPU"
                     : "set optimizer.name = \"adamw\", or --gpus 0 for the CPU"});
}

}  // namespace

ChosenNumerics choose_numerics(const PlanInput& in) {
  if (in.trains()) refuse_products(in.config.model.products, in.device, in.machine);
  refuse_bf16(in);
  if (in.trains()) refuse_router_loss(in.config.train, in.spec);
  if (in.trains()) refuse_parallel_experts(in, in.world);
  LM_CHECK(!in.trains() || in.layout.experts == expert_share(in.config, in.world, in.layout.experts.place),
           "a layout of another number of ranks");
  // A run that began on a larger machine goes on with its number.
  if (in.trains() && in.recorded == nullptr) {
    refuse_many_threads("run.threads", in.config.run.threads, in.machine);
    refuse_many_threads("optimizer.threads", in.config.optimizer.threads, in.machine);
  }
  // What generated answers take of the memory is no matter of numerics: a run has the same bits without them.
  Config config = in.config;
  config.train.sample_prompts.clear();
  config.eval.generate.data.clear();
  // Measured, and so not the same in every run.
  Machine machine = in.machine;
  machine.library_bytes = 0;
  const PlanInput training = in.with(config).with(PlanPurpose::kTrain).with(machine);
  ChosenNumerics out;
  std::vector<Choice> choices = explain_optimizer(in);
  if (in.recorded != nullptr) {
    out = adopted(training);
  } else {
    const NumericsPlan base = settled(training);
    if (!in.config.run.threads)
      choices.push_back({"run.threads", std::to_string(base.threads), "the cores this process may use"});
    out = choose_batches(training, base);
  }
  refuse_many_micro_batches(in.config, out.numerics);
  out.choices.insert(out.choices.begin(), choices.begin(), choices.end());
  return out;
}

}  // namespace lm
