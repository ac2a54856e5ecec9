#include "plan/predict.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace lm {
namespace {

// Per core where nothing was measured: large GEMMs on a current server with AVX-512-BF16, and without it,
// where bf16 runs at fp32's rate.
constexpr double kCoreBF16 = 150e9, kCoreF32 = 60e9, kCoreBandwidth = 12e9;
// A GPU that the table does not know.
constexpr double kGpuBF16 = 100e12, kGpuF32 = 20e12, kGpuBandwidth = 500e9;
// Shares of the peak that large operations are assumed to reach: predictions only, never the speed of light.
constexpr double kGpuGemmShare = 0.7, kGpuAttentionShare = 0.4, kGpuBandwidthShare = 0.8;
constexpr double kCpuAttentionShare = 0.4;  // of the GEMM rate

double known(double value, double otherwise, bool& assumed) {
  if (value > 0) return value;
  assumed = true;
  return otherwise;
}

double size_of(DType type) {
  return static_cast<double>(dtype_size(type));
}

struct BlockSizes {
  double base = 0;  // matrix elements of the model, trained or frozen
  double adapters = 0;
  double flat = 0;  // trainable, padding included
};

BlockSizes block_sizes(const BlockLayout& layout) {
  BlockSizes sizes;
  for (const TensorPlace& place : layout.tensors) {
    const auto elements = static_cast<double>(place.parameter.elements());
    switch (place.parameter.kind) {
      case ParameterKind::kMatrix:
        sizes.base += elements;
        break;
      case ParameterKind::kLoraA:
      case ParameterKind::kLoraB:
        sizes.adapters += elements;
        break;
      default:
        break;
    }
  }
  sizes.flat = static_cast<double>(layout.flat_elements);
  return sizes;
}

// Sum over a batch's tokens of the keys that a layer's attention sees, the diagonal counted half.
double visible_keys(const StepWork& work, double window) {
  if (work.tokens <= 0) return 0;
  const double length = work.squares / work.tokens;  // as a token sees its document
  if (window <= 0 || window >= length) return work.squares / 2;
  return work.tokens * (window - window * window / (2 * length));
}

// The costs of a transformer block and of the two ends, for one micro-batch.
class Coster {
 public:
  Coster(const StepShape& shape, const Operation& op)
      : shape_(shape),
        spec_(shape.spec),
        op_(op),
        sizes_(block_sizes(shape.layout.blocks[static_cast<size_t>(op.block)])),
        tokens_(shape.micro.tokens),
        e_(size_of(shape.dtype)),
        g_(size_of(shape.gradient_dtype)),
        hidden_(static_cast<double>(spec_.hidden)),
        ffn_(static_cast<double>(spec_.ffn)),
        q_(static_cast<double>(spec_.q_rows())),
        kv_(static_cast<double>(spec_.kv_rows())) {}

  Cost cost() const {
    switch (op_.kind) {
      case OperationKind::kForward:
        if (is_head()) return op_.segment < 0 ? head_ends() : segment_forward();
        return op_.block == 0 ? Cost{0, 0, 2 * tokens_ * hidden_ * e_} : forward(true);
      case OperationKind::kRecompute:
        return forward(false);
      case OperationKind::kHead:
        return head();
      case OperationKind::kBackward:
        if (is_head()) return op_.segment < 0 ? head_ends() : segment_backward();
        return op_.block == 0 ? embedding_backward() : backward();
      case OperationKind::kReduce:
        return {0, 0, unit_elements() * g_ + finish_rows()};
      case OperationKind::kUpdate:
        // Reads gradient, weight and state; writes all but the gradient.
        return {0, 0, unit_elements() * (g_ + 2 * (e_ + static_cast<double>(shape_.state_bytes)))};
      default:
        return {};
    }
  }

 private:
  bool is_head() const { return op_.block > spec_.layers; }
  // Of the segment, or of the block: all of it, or what its segments leave.
  double unit_elements() const {
    const double matrix = static_cast<double>(spec_.vocab) * hidden_;
    if (op_.segment >= 0) return shape_.lora ? 0 : segment_rows() * hidden_;
    return shape_.cut_head && is_head() ? std::max(sizes_.flat - matrix, 0.0) : sizes_.flat;
  }
  double segment_rows() const {
    return static_cast<double>(std::min(kVocabularySegment, spec_.vocab - op_.segment * kVocabularySegment));
  }

  bool trains_embedding() const { return shape_.layout.blocks.front().flat_elements > 0; }

  double attention_pairs() const {
    const auto window = static_cast<double>(spec_.window[static_cast<size_t>(op_.block - 1)]);
    return visible_keys(shape_.micro, window) * q_;
  }

  // Element passes: both norms with the residual, RoPE, the projections' outputs that attention reads,
  // SwiGLU. A recomputation stops before SwiGLU and the last projection.
  Cost forward(bool whole) const {
    const double down = hidden_ * ffn_;
    double elements = 6 * hidden_ + 3 * (q_ + kv_) + 2 * q_;
    if (spec_.qk_norm) elements += 3 * (q_ + kv_);
    if (whole) elements += 3 * ffn_;
    const double gemm = 2 * (sizes_.base - (whole ? 0 : down) + sizes_.adapters);
    return {gemm * tokens_, 4 * attention_pairs(), elements * tokens_ * e_};
  }

  Cost backward() const {
    // The first block's input gradient is wanted by a trained embedding only.
    const double unwanted = op_.block == 1 && !trains_embedding() ? (q_ + 2 * kv_) * hidden_ : 0;
    const double gemm = shape_.lora ? 2 * (sizes_.base - unwanted) + 4 * sizes_.adapters : 4 * sizes_.base;
    double elements = 6 * ffn_ + 12 * hidden_ + 4 * (q_ + 2 * kv_);
    if (spec_.qk_norm) elements += 3 * (q_ + kv_);
    // Flash attention multiplies five times where the forward does twice.
    return {gemm * tokens_, 10 * attention_pairs(),
            elements * tokens_ * e_ + weight_gradient(sizes_.flat, op_.micro == 0)};
  }

  // Adding a weight gradient of `elements`: the CPU goes through scratch of the model's type, GPUs add in the
  // GEMM.
  double weight_gradient(double elements, bool first) const {
    const bool scratch = shape_.device == DeviceType::kCpu && shape_.dtype != shape_.gradient_dtype;
    return elements * ((first ? 1 : 2) * g_ + (scratch ? e_ : 0));
  }

  Cost head() const {
    const double rows = shape_.micro.target_rows, vocab = static_cast<double>(spec_.vocab);
    Cost cost;
    cost.gemm_flops = (shape_.lora ? 4 : 6) * vocab * hidden_ * rows;
    // Statistics read the logits, the gradient reads and writes them; dX is added per segment in fp32.
    cost.bytes = 3 * rows * vocab * e_ +
                 rows * hidden_ * std::ceil(vocab / static_cast<double>(kVocabularySegment)) * (8 + e_) +
                 8 * rows * hidden_ * e_ + head_gradient(vocab * hidden_);
    return cost;
  }

  // Every chunk of rows adds to it.
  double head_gradient(double elements) const {
    if (shape_.lora) return 0;
    const double chunks = std::ceil(shape_.micro.target_rows / static_cast<double>(shape_.row_chunk));
    const bool first = op_.micro == 0;
    const double added = weight_gradient(elements, false) * std::max(0.0, chunks - (first ? 1 : 0));
    return first && chunks > 0 ? added + weight_gradient(elements, true) : added;
  }

  // A cut head computes its logits in both passes.
  Cost segment_forward() const {
    const double logits = shape_.micro.target_rows * segment_rows();
    return {2 * logits * hidden_, 0, logits * e_};
  }
  Cost segment_backward() const {
    const double rows = shape_.micro.target_rows, logits = rows * segment_rows();
    return {(shape_.lora ? 4 : 6) * logits * hidden_, 0,
            2 * logits * e_ + rows * hidden_ * (8 + e_) + head_gradient(segment_rows() * hidden_)};
  }
  // Rows picked and normed; or the other way round.
  Cost head_ends() const { return {0, 0, 4 * shape_.micro.target_rows * hidden_ * e_}; }

  Cost embedding_backward() const {
    return trains_embedding() ? Cost{0, 0, tokens_ * hidden_ * (e_ + 8)} : Cost{};
  }

  // The embedding's rows are added to its gradient once per step.
  double finish_rows() const {
    if (op_.block != 0 || !trains_embedding()) return 0;
    return std::min(static_cast<double>(spec_.vocab), shape_.step_tokens) * hidden_ * (4 + 2 * g_);
  }

  const StepShape& shape_;
  const ModelSpec& spec_;
  const Operation& op_;
  BlockSizes sizes_;
  double tokens_, e_, g_, hidden_, ffn_, q_, kv_;
};

void add(Prediction& to, OperationKind kind, const Cost& cost, double times, const ComputeRates& rates) {
  const Cost scaled{cost.gemm_flops * times, cost.attention_flops * times, cost.bytes * times};
  const double seconds = cost_seconds(scaled, rates);
  to.seconds += seconds;
  to.by_kind[static_cast<size_t>(kind)] += seconds;
  to.gemm_seconds += scaled.gemm_flops / rates.gemm_flops;
  to.attention_seconds += scaled.attention_flops / rates.attention_flops;
  to.memory_seconds += scaled.bytes / rates.bandwidth;
  to.cost += scaled;
}

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  gemm_flops += other.gemm_flops;
  attention_flops += other.attention_flops;
  bytes += other.bytes;
  return *this;
}

StepWork uniform_work(double tokens, double length, double target_share) {
  return {tokens, tokens * target_share, tokens * length};
}

double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, bool lora, const StepWork& work) {
  double base = 0, adapters = 0, attention = 0;
  for (size_t b = 1; b + 1 < layout.blocks.size(); ++b) {
    const BlockSizes sizes = block_sizes(layout.blocks[b]);
    base += sizes.base;
    adapters += sizes.adapters;
  }
  const auto width = static_cast<double>(spec.q_rows());
  for (const int64_t window : spec.window)
    attention += visible_keys(work, static_cast<double>(window)) * width;
  const double head = static_cast<double>(spec.vocab * spec.hidden) * work.target_rows;
  return (lora ? 4 : 6) * (base * work.tokens + head) + 6 * adapters * work.tokens + 12 * attention;
}

double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, bool lora, int64_t sequence) {
  return necessary_flops(spec, layout, lora, uniform_work(1, static_cast<double>(sequence)));
}

ComputeRates compute_rates(const Machine& machine, DeviceType device, DType dtype) {
  const bool bf16 = dtype == DType::kBF16;
  ComputeRates rates;
  if (device == DeviceType::kCuda) {
    LM_CHECK(!machine.gpus.empty(), "a plan for a GPU needs one");
    const Gpu& gpu = machine.gpus.front();
    rates.peak_flops =
        bf16 ? known(gpu.bf16_flops, kGpuBF16, rates.assumed) : known(gpu.fp32_flops, kGpuF32, rates.assumed);
    rates.gemm_flops = kGpuGemmShare * rates.peak_flops;
    rates.attention_flops = kGpuAttentionShare * rates.peak_flops;
    rates.bandwidth = kGpuBandwidthShare * known(gpu.bandwidth, kGpuBandwidth, rates.assumed);
    return rates;
  }
  const double cores = std::max(machine.cores, 1);
  rates.peak_flops = bf16 ? known(machine.gemm_bf16_flops,
                                  cores * (machine.avx512_bf16 ? kCoreBF16 : kCoreF32), rates.assumed)
                          : known(machine.gemm_fp32_flops, cores * kCoreF32, rates.assumed);
  rates.gemm_flops = machine.gemm_sustained * rates.peak_flops;
  rates.attention_flops = kCpuAttentionShare * rates.gemm_flops;
  rates.bandwidth = known(machine.memory_bandwidth, cores * kCoreBandwidth, rates.assumed);
  return rates;
}

Cost operation_cost(const StepShape& shape, const Operation& operation) {
  return Coster(shape, operation).cost();
}

double cost_seconds(const Cost& cost, const ComputeRates& rates) {
  return cost.gemm_flops / rates.gemm_flops + cost.attention_flops / rates.attention_flops +
         cost.bytes / rates.bandwidth;
}

Prediction predict_step(const StepShape& shape, const ScheduleShape& schedule, const ComputeRates& rates) {
  // Micro-batches after the first cost the same: two are walked, the second stands for the others.
  ScheduleShape walked = schedule;
  walked.micro_batches = std::min<int64_t>(schedule.micro_batches, 2);
  const auto others = static_cast<double>(schedule.micro_batches - 1);
  Prediction out;
  for (const Operation& operation : make_schedule(walked).operations) {
    const Cost cost = operation_cost(shape, operation);
    const ScheduleShape::Tiles tiles = schedule.updates(operation.block, operation.segment);
    const double times = operation.kind == OperationKind::kUpdate
                             ? 1 / static_cast<double>(tiles.end - tiles.first)  // of the unit
                         : operation.micro == 0 ? 1
                                                : others;
    add(out, operation.kind, cost, times, rates);
  }
  return out;
}

}  // namespace lm
