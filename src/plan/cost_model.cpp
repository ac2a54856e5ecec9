#include "plan/cost_model.h"

#include <algorithm>

#include "base/error.h"
#include "plan/update_work.h"

namespace lm {
namespace {

// Per core where nothing was measured: large GEMMs on a current server with AVX-512-BF16, and without it,
// where bf16 runs at fp32's rate.
constexpr double kCoreBF16 = 150e9, kCoreF32 = 60e9, kCoreBandwidth = 12e9;
// Shares of the peak that large operations are assumed to reach: estimate only, never the speed of light.
constexpr double kGpuGemmShare = 0.7, kGpuAttentionShare = 0.4, kGpuBandwidthShare = 0.8;
// FlashAttention 2 has none of the matrix instructions that came with Hopper, and of Hopper's peak a smaller
// share: 330 TFLOP/s forward and 264 backward of 989, whatever an H100's or H200's memory.
constexpr double kHopperAttentionShare = 0.3;
// Of the GEMM rate, where it was not measured: 0.4 of what AVX-512 reaches, 0.12 of what AMX does.
constexpr double kCpuAttentionShare = 0.4;
// Norms, SwiGLU and softmax against memcpy (benchmarks/kernels.py: 0.2 .. 0.6), and what a call costs on the
// CPU beside its work: two threads woken, ATen's checks.
constexpr double kCpuPassShare = 0.4, kCpuCallSeconds = 20e-6;

// Between ranks: GPUs of a machine over PCIe 4 x16, machines over one InfiniBand adapter of 400 Gbit/s each;
// a meeting of all, and a message to a rank of another machine.
constexpr double kPeerBandwidth = 22e9, kNetworkBandwidth = 45e9;
constexpr double kMeetingSeconds = 20e-6, kMessageSeconds = 2e-6;

double known(double value, double otherwise, bool& assumed) {
  if (value > 0) return value;
  assumed = true;
  return otherwise;
}

// Sum over a batch's tokens of the keys that a layer's attention sees, the diagonal counted half.
double visible_keys(const StepWork& work, double window) {
  if (work.tokens <= 0) return 0;
  const double length = work.squares / work.tokens;  // as a token sees its document
  if (window <= 0 || window >= length) return work.squares / 2;
  return work.tokens * (window - window * window / (2 * length));
}

double memory_seconds(const Cost& cost, const ComputeRates& rates) {
  return cost.bytes / rates.bandwidth + cost.pass_bytes / rates.pass_bandwidth +
         cost.decoded_bytes / rates.decode_bandwidth + (cost.calls - cost.gemm_calls) * rates.call_seconds +
         cost.gemm_calls * rates.gemm_call_seconds;
}

double gemm_seconds(const Cost& cost, const ComputeRates& rates) {
  return (cost.gemm_flops - cost.fp32_gemm_flops) / rates.gemm_flops +
         cost.fp32_gemm_flops / rates.fp32_gemm_flops;
}

// Of flash attention on a GPU each call has its own rate, which the counts know.
double attention_seconds(const Cost& cost, const ComputeRates& rates) {
  return (cost.attention_flops - cost.timed_flops) / rates.attention_flops + cost.attention_seconds;
}

void add(StepEstimate& to, OperationKind kind, const Cost& cost, double times, const ComputeRates& rates) {
  Cost scaled = cost;
  scaled *= times;
  const double seconds = cost_seconds(scaled, rates);
  to.seconds += seconds;
  to.by_kind[static_cast<size_t>(kind)] += seconds;
  to.gemm_seconds += gemm_seconds(scaled, rates);
  to.attention_seconds += attention_seconds(scaled, rates);
  to.memory_seconds += memory_seconds(scaled, rates);
  to.cost += scaled;
}

}  // namespace

StepWork uniform_work(double tokens, double length, double target_share) {
  return {tokens, tokens * target_share, tokens * length};
}

double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, const StepWork& work) {
  // Forward, backward to the input, and backward to the weight: 2 FLOP each.
  const int64_t trained = layout.first_trained(), head = std::ssize(layout.blocks) - 1;
  double flops = 0;
  for (int64_t b = 1; b < head; ++b) {
    const double backward = b < trained ? 0 : 2;
    const ExpertsSpec* const experts = spec.layer(b - 1).find<ExpertsSpec>();
    const auto add = [&](const Parameter& parameter, bool frozen) {
      if (parameter.kind != ParameterKind::kMatrix) return;
      // Of the tokens that meet an expert's matrix, on average.
      const double share = parameter.of_expert()
                               ? static_cast<double>(experts->chosen) / static_cast<double>(experts->experts)
                               : 1;
      flops +=
          (2 + backward + (frozen ? 0 : 2)) * static_cast<double>(parameter.elements()) * share * work.tokens;
    };
    const BlockLayout& block = layout.blocks[static_cast<size_t>(b)];
    for (const TensorPlace& place : block.tensors) add(place.parameter, place.frozen);
    for (const Parameter& parameter : block.elsewhere) add(parameter, true);
    const AttentionSpec* const a = spec.layer(b - 1).find<AttentionSpec>();
    if (a == nullptr) continue;
    flops += (b < trained ? 4 : 12) * visible_keys(work, static_cast<double>(a->window)) *
             static_cast<double>(a->q_rows());
  }
  const TensorPlace* const matrix =
      spec.tied ? layout.blocks.front().find("embed") : layout.blocks.back().find("head");
  const double of_head = (trained < head ? 4 : 2) + (matrix == nullptr || matrix->frozen ? 0 : 2);
  return flops + of_head * static_cast<double>(spec.head_rows() * spec.hidden) * work.target_rows;
}

ComputeRates compute_rates(const Machine& machine, DeviceType device, DType dtype, Products products) {
  // GPUs multiply fp16 as fast as bf16; the CPU's products of fp16 are fp32's.
  const bool bf16 = dtype == DType::kBF16 || (dtype == DType::kF16 && device == DeviceType::kCuda);
  ComputeRates rates;
  bool fp32_assumed = false;
  if (device == DeviceType::kCuda) {
    LM_CHECK(!machine.gpus.empty(), "a plan for a GPU needs one");
    const Gpu& gpu = machine.gpus.front();
    // Tensor cores multiply TF32 at half the rate of bf16, on every card.
    const double fp32 = products == Products::kTF32 ? known(gpu.bf16_flops, kAssumedGpuBF16, fp32_assumed) / 2
                                                    : known(gpu.fp32_flops, kAssumedGpuF32, fp32_assumed);
    rates.peak_flops = bf16 ? known(gpu.bf16_flops, kAssumedGpuBF16, rates.assumed) : fp32;
    rates.gemm_flops = kGpuGemmShare * rates.peak_flops;
    rates.fp32_gemm_flops = kGpuGemmShare * fp32;
    rates.assumed |= !bf16 && fp32_assumed;
    const bool hopper = gpu.capability.major == 9 || gpu.capability.major == 10;
    rates.attention_flops = (hopper ? kHopperAttentionShare : kGpuAttentionShare) * rates.peak_flops;
    rates.bandwidth = kGpuBandwidthShare * known(gpu.bandwidth, kAssumedGpuBandwidth, rates.assumed);
    rates.pass_bandwidth = rates.decode_bandwidth = rates.bandwidth;
    return rates;
  }
  const double cores = std::max(machine.cores, 1);
  const double core = machine.instructions >= Instructions::kAvx512Bf16 ? kCoreBF16 : kCoreF32;
  double fp32 = known(machine.gemm_fp32_flops, cores * kCoreF32, fp32_assumed);
  rates.peak_flops = bf16 ? known(machine.gemm_bf16_flops, cores * core, rates.assumed) : fp32;
  // Where bf16 alone was measured, as much slower as it is by default.
  if (bf16 && fp32_assumed) fp32 = rates.peak_flops * (kCoreF32 / core);
  rates.gemm_flops = machine.gemm_sustained * rates.peak_flops;
  rates.fp32_gemm_flops = machine.gemm_sustained * fp32;
  rates.assumed |= !bf16 && fp32_assumed;
  rates.bandwidth = known(machine.memory_bandwidth, cores * kCoreBandwidth, rates.assumed);
  rates.pass_bandwidth = kCpuPassShare * rates.bandwidth;
  // Kept with the rate of products, and never without it; no kernel is faster than the peak.
  bool ignored = false;
  rates.attention_flops = std::min(
      known(machine.attention_flops, kCpuAttentionShare * rates.gemm_flops, ignored), rates.peak_flops);
  rates.decode_bandwidth = known(machine.decode_bandwidth, rates.pass_bandwidth, ignored);
  rates.peak_flops =
      std::max(rates.peak_flops, machine.fastest_flops);  // last: no product of this type reaches it
  rates.call_seconds = kCpuCallSeconds;
  rates.gemm_call_seconds = known(machine.gemm_call_seconds, kCpuCallSeconds, ignored);
  return rates;
}

RankLinks rank_links(const Machine& machine, DeviceType device) {
  RankLinks links{.call_seconds = kMeetingSeconds, .message_seconds = kMessageSeconds};
  // Processes of a machine pass bytes through memory that they share: a copy into it is read and written.
  links.inside = device == DeviceType::kCuda
                     ? known(machine.gpus.front().peer_bandwidth, kPeerBandwidth, links.assumed)
                     : compute_rates(machine, device, DType::kF32).bandwidth / 2;
  links.between = known(machine.network_bandwidth, kNetworkBandwidth, links.assumed);
  return links;
}

StepCosts::StepCosts(const StepShape& shape)
    : pass_(pass_costs(shape.model, shape.step, shape.micro, shape.attention_rate)),
      units_(shape.model.layout.units(shape.step.chunked_head())) {
  const StepConfig& step = shape.step;
  const auto size = [](DType type) { return static_cast<double>(dtype_size(type)); };
  gradient_bytes_ = size(step.arithmetic.gradient_dtype);
  // Reads gradient, weight and state; writes all but the gradient.
  const double update_bytes =
      gradient_bytes_ + 2 * (size(step.arithmetic.trained_dtype()) + shape.state_bytes);
  // Beside what the links do (traffic.h): the ranks' parts of a shard are read and their sum is written, and
  // what arrives is copied to its place.
  const double each = step.sharding().group, rest = 1 / each - 1.0 / step.ranks;
  reduce_scatter_bytes_ = step.ranks == 1 ? 0 : gradient_bytes_ * (1 + 3.0 / step.ranks);
  reduce_scatter_bytes_ += rest * 2 * gradient_bytes_;
  gather_bytes_ = (1 - 1 / each) * 2 * size(step.arithmetic.trained_dtype());
  for (const Unit& unit : units_) {
    Cost update = update_products(shape.model.layout.blocks[static_cast<size_t>(unit.block)], unit.first,
                                  unit.elements, shape.rule, step.device, nullptr);
    const auto elements = static_cast<double>(unit.elements);
    double here = elements / each;
    // Of whole tensors the longest shard, for which the other ranks wait.
    if (step.sharding().of_whole_tensors(unit) && unit.elements > 0) {
      here = static_cast<double>(longest_shard(unit, step.sharding()));
      update.gemm_flops *= shape.bf16_time * here / elements;
    }
    update.bytes += here * update_bytes;
    updates_.push_back(update);
  }
  // A prompt is there without rows of a table.
  if (units_.front().elements > 0 && !shape.model.layout.blocks.front().trains("prompt")) {
    const ModelSpec& spec = shape.model.spec;
    const double rows = std::min(static_cast<double>(spec.vocab), shape.step_tokens) +
                        std::min(static_cast<double>(spec.embedding.positions), shape.step_tokens);
    const double tokens = std::min(static_cast<double>(spec.embedding.inputs.vocab), shape.step_tokens);
    const double elements =
        rows * static_cast<double>(spec.hidden) + tokens * static_cast<double>(spec.embedding.inputs.all());
    embedding_rows_ = elements * (4 + 2 * gradient_bytes_);
  }
}

Cost StepCosts::of(const Operation& operation) const {
  const auto elements = static_cast<double>(units_[static_cast<size_t>(operation.unit)].elements);
  if (operation.kind == OperationKind::kUpdate) return updates_[static_cast<size_t>(operation.unit)];
  if (operation.kind == OperationKind::kReduceScatter) return {.bytes = elements * reduce_scatter_bytes_};
  if (operation.kind == OperationKind::kGather) return {.bytes = elements * gather_bytes_};
  if (operation.kind == OperationKind::kAddRows) return {.bytes = embedding_rows_};
  if (operation.kind == OperationKind::kNorm) return {.bytes = elements * gradient_bytes_};
  if (!computes(operation.kind)) return {};
  return pass_[static_cast<size_t>(operation.unit)][static_cast<size_t>(operation.kind)]
              [operation.micro == 0 ? 0 : 1];
}

double cost_seconds(const Cost& cost, const ComputeRates& rates) {
  return gemm_seconds(cost, rates) + attention_seconds(cost, rates) + memory_seconds(cost, rates);
}

StepEstimate estimate_step(const StepCosts& costs, const StepConfig& step, const ComputeRates& rates) {
  // Micro-batches after the first cost the same: two are walked, the second stands for the others.
  StepConfig walked = step;
  walked.micro_batches = std::min<int64_t>(step.micro_batches, 2);
  const auto others = static_cast<double>(step.micro_batches - 1);
  StepEstimate out;
  for (const Operation& operation : make_schedule(walked).operations) {
    const Cost cost = costs.of(operation);
    const double times = operation.kind == OperationKind::kUpdate
                             ? 1 / static_cast<double>(step.unit(operation.unit).tiles())  // of the unit
                         : operation.micro == 0 ? 1
                                                : others;
    add(out, operation.kind, cost, times, rates);
  }
  return out;
}

}  // namespace lm
