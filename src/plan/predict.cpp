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
// Norms, SwiGLU and softmax against memcpy (benchmarks/kernels.py: 0.2 .. 0.6), and what a call costs on the
// CPU beside its work: two threads woken, ATen's checks.
constexpr double kCpuPassShare = 0.4, kCpuCallSeconds = 20e-6;

double known(double value, double otherwise, bool& assumed) {
  if (value > 0) return value;
  assumed = true;
  return otherwise;
}

double size_of(DType type) {
  return static_cast<double>(dtype_size(type));
}

// The matrices of a kind of a block's tensors.
struct Matrices {
  double count = 0, elements = 0;
  double widths = 0;  // rows and columns, summed: what a token's pass through them reads and writes
};

struct BlockSizes {
  Matrices base;      // of the model, trained or frozen
  Matrices adapters;  // A and B
  double flat = 0;    // trainable, padding included
};

BlockSizes block_sizes(const BlockLayout& layout) {
  BlockSizes sizes;
  for (const TensorPlace& place : layout.tensors) {
    const Parameter& p = place.parameter;
    const bool adapter = p.kind == ParameterKind::kLoraA || p.kind == ParameterKind::kLoraB;
    if (!adapter && p.kind != ParameterKind::kMatrix) continue;
    Matrices& kind = adapter ? sizes.adapters : sizes.base;
    kind.count += 1;
    kind.elements += static_cast<double>(p.elements());
    kind.widths += static_cast<double>(p.rows + p.columns);
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
        return op_.block == 0 ? Cost{.bytes = 2 * tokens_ * hidden_ * e_} : forward(true);
      case OperationKind::kRecompute:
        return forward(false);
      case OperationKind::kHead:
        return head();
      case OperationKind::kBackward:
        if (is_head()) return op_.segment < 0 ? head_ends() : segment_backward();
        return op_.block == 0 ? embedding_backward() : backward();
      case OperationKind::kReduce:
        return {.bytes = unit_elements() * g_ + finish_rows()};
      case OperationKind::kUpdate:
        // Reads gradient, weight and state; writes all but the gradient.
        return {.bytes = unit_elements() * (g_ + 2 * (e_ + static_cast<double>(shape_.state_bytes)))};
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

  // What `times` products with each of these matrices move. A GPU's large products hide it, and the narrow
  // ones of adapters nowhere.
  double operands(const Matrices& matrices, double times, bool narrow) const {
    if (!narrow && shape_.device == DeviceType::kCuda) return 0;
    return times * (tokens_ * matrices.widths + matrices.elements) * e_;
  }

  // Element passes: both norms with the residual, RoPE, the projections' outputs that attention reads,
  // SwiGLU. A recomputation stops before SwiGLU and the last projection.
  Cost forward(bool whole) const {
    const double down = hidden_ * ffn_;
    double elements = 6 * hidden_ + 3 * (q_ + kv_) + 2 * q_;
    if (spec_.qk_norm) elements += 3 * (q_ + kv_);
    if (whole) elements += 3 * ffn_;
    Cost cost;
    cost.gemm_flops = 2 * (sizes_.base.elements - (whole ? 0 : down) + sizes_.adapters.elements) * tokens_;
    cost.attention_flops = 4 * attention_pairs();
    // B adds to what the projection wrote: it is read, too.
    cost.bytes = operands(sizes_.base, 1, false) + operands(sizes_.adapters, 1.5, true);
    cost.pass_bytes = elements * tokens_ * e_;
    cost.calls = 5 + sizes_.base.count + sizes_.adapters.count;
    return cost;
  }

  Cost backward() const {
    // The first block's input gradient is wanted by a trained embedding only.
    const double unwanted = op_.block == 1 && !trains_embedding() ? (q_ + 2 * kv_) * hidden_ : 0;
    const double gemm = shape_.lora ? 2 * (sizes_.base.elements - unwanted) + 4 * sizes_.adapters.elements
                                    : 4 * sizes_.base.elements;
    double elements = 6 * ffn_ + 12 * hidden_ + 4 * (q_ + 2 * kv_);
    if (spec_.qk_norm) elements += 3 * (q_ + kv_);
    Cost cost;
    cost.gemm_flops = gemm * tokens_;
    cost.attention_flops = 10 * attention_pairs();  // flash attention multiplies five times, forward twice
    // A weight gradient is a product of a transposed operand, which is brought into order first.
    cost.bytes = operands(sizes_.base, shape_.lora ? 1 : 3, false) + operands(sizes_.adapters, 5, true) +
                 weight_gradient(sizes_.flat, op_.micro == 0);
    cost.pass_bytes = elements * tokens_ * e_;
    cost.calls = 8 + (shape_.lora ? 1 : 3) * sizes_.base.count + 4 * sizes_.adapters.count;
    return cost;
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
    cost.pass_bytes = 3 * rows * vocab * e_;
    cost.bytes = rows * hidden_ * std::ceil(vocab / static_cast<double>(kVocabularySegment)) * (8 + e_) +
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
    return {.gemm_flops = 2 * logits * hidden_, .pass_bytes = logits * e_};
  }
  Cost segment_backward() const {
    const double rows = shape_.micro.target_rows, logits = rows * segment_rows();
    return {.gemm_flops = (shape_.lora ? 4 : 6) * logits * hidden_,
            .bytes = rows * hidden_ * (8 + e_) + head_gradient(segment_rows() * hidden_),
            .pass_bytes = 2 * logits * e_};
  }
  // Rows picked and normed; or the other way round.
  Cost head_ends() const { return {.bytes = 4 * shape_.micro.target_rows * hidden_ * e_}; }

  Cost embedding_backward() const {
    return trains_embedding() ? Cost{.bytes = tokens_ * hidden_ * (e_ + 8)} : Cost{};
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

double memory_seconds(const Cost& cost, const ComputeRates& rates) {
  return cost.bytes / rates.bandwidth + cost.pass_bytes / rates.pass_bandwidth +
         cost.calls * rates.call_seconds;
}

void add(Prediction& to, OperationKind kind, const Cost& cost, double times, const ComputeRates& rates) {
  const Cost scaled{cost.gemm_flops * times, cost.attention_flops * times, cost.bytes * times,
                    cost.pass_bytes * times, cost.calls * times};
  const double seconds = cost_seconds(scaled, rates);
  to.seconds += seconds;
  to.by_kind[static_cast<size_t>(kind)] += seconds;
  to.gemm_seconds += scaled.gemm_flops / rates.gemm_flops;
  to.attention_seconds += scaled.attention_flops / rates.attention_flops;
  to.memory_seconds += memory_seconds(scaled, rates);
  to.cost += scaled;
}

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  gemm_flops += other.gemm_flops;
  attention_flops += other.attention_flops;
  bytes += other.bytes;
  pass_bytes += other.pass_bytes;
  calls += other.calls;
  return *this;
}

StepWork uniform_work(double tokens, double length, double target_share) {
  return {tokens, tokens * target_share, tokens * length};
}

double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, bool lora, const StepWork& work) {
  double base = 0, adapters = 0, attention = 0;
  for (size_t b = 1; b + 1 < layout.blocks.size(); ++b) {
    const BlockSizes sizes = block_sizes(layout.blocks[b]);
    base += sizes.base.elements;
    adapters += sizes.adapters.elements;
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
    rates.pass_bandwidth = rates.bandwidth;
    return rates;
  }
  const double cores = std::max(machine.cores, 1);
  rates.peak_flops = bf16 ? known(machine.gemm_bf16_flops,
                                  cores * (machine.avx512_bf16 ? kCoreBF16 : kCoreF32), rates.assumed)
                          : known(machine.gemm_fp32_flops, cores * kCoreF32, rates.assumed);
  rates.gemm_flops = machine.gemm_sustained * rates.peak_flops;
  rates.attention_flops = kCpuAttentionShare * rates.gemm_flops;
  rates.bandwidth = known(machine.memory_bandwidth, cores * kCoreBandwidth, rates.assumed);
  rates.pass_bandwidth = kCpuPassShare * rates.bandwidth;
  rates.call_seconds = kCpuCallSeconds;
  return rates;
}

Cost operation_cost(const StepShape& shape, const Operation& operation) {
  return Coster(shape, operation).cost();
}

double cost_seconds(const Cost& cost, const ComputeRates& rates) {
  return cost.gemm_flops / rates.gemm_flops + cost.attention_flops / rates.attention_flops +
         memory_seconds(cost, rates);
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
