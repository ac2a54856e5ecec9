#include "plan/plan.h"

#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

// Resident memory of lmlaunch-cpu | -cuda before the first weight: libraries, thread stacks, GEMM workspaces.
constexpr int64_t kCpuBase = 190 * kMiB;
constexpr int64_t kCudaBase = 900 * kMiB;
// Set aside on a GPU for the CUDA context, cuBLAS workspaces and what ATen's attention allocates itself.
constexpr int64_t kGpuReserve = 1 * kGiB;
// Defaults where nothing was measured, per core.
constexpr double kGemmBf16PerCore = 150e9, kGemmFp32PerCore = 60e9, kBandwidthPerCore = 12e9;
constexpr double kUsableShare = 0.9;       // of the memory that is available
constexpr int64_t kCpuMicroTokens = 2048;  // GEMMs gain nothing from more at once, activations grow
constexpr int64_t kGpuMicroTokens = 16384;
constexpr int64_t kRowChunk = 512;  // 512 x 49152 bf16 logits: 48 MiB

int64_t size_of(DType type) {
  return static_cast<int64_t>(dtype_size(type));
}

struct Costing {
  const Config& config;
  const ModelSpec& spec;
  const AdapterSpec* adapter;
  const ModelLayout& layout;
  const Machine& machine;
  DeviceType device;
};

ActivationShape activation_shape(const Costing& in, const NumericsPlan& numerics) {
  const int64_t tokens = numerics.micro_batch * in.config.data.max_length;
  // A document has at least two tokens; without packing a sequence is one document.
  return {.tokens = tokens,
          .documents = in.config.data.packing ? tokens / 2 : numerics.micro_batch,
          .row_chunk = numerics.row_chunk,
          .recompute = numerics.recompute,
          .train_embedding = in.adapter == nullptr,
          .dtype = numerics.dtype,
          .gradient_dtype = numerics.gradient_dtype,
          .device = in.device,
          .threads = numerics.threads};
}

int64_t master_bytes(const Costing& in, DType dtype) {
  if (dtype == DType::kF32) return 0;
  switch (in.config.optimizer.master) {
    case Master::kSplit:
      return 2;
    case Master::kF32:
      return 4;
    case Master::kNone:
      return 0;
  }
  return 0;
}

void fill_bytes(const Costing& in, Plan& plan) {
  const NumericsPlan& n = plan.numerics;
  const int64_t flat = in.layout.flat_elements, master = master_bytes(in, n.dtype);
  const int64_t step_tokens = in.config.train.global_batch * in.config.data.max_length;
  const int64_t rows = in.adapter == nullptr ? std::min(in.spec.vocab, step_tokens) * in.spec.hidden * 4 : 0;
  plan.micro_tokens = n.micro_batch * in.config.data.max_length;
  plan.arena = arena_need(in.spec, in.adapter, activation_shape(in, n));
  const int64_t base = in.device == DeviceType::kCpu ? kCpuBase : kGpuReserve;
  const auto note = [](int64_t bytes, DType type) {
    return std::string(dtype_name(type)) + ", " + std::to_string(bytes) + " B per parameter";
  };
  plan.classes = {
      {state_class_name(StateClass::kWeights), flat * size_of(n.dtype), note(size_of(n.dtype), n.dtype)},
      {state_class_name(StateClass::kFrozenWeights), in.layout.frozen_bytes, dtype_name(n.dtype)},
      {state_class_name(StateClass::kGradients), flat * size_of(n.gradient_dtype),
       note(size_of(n.gradient_dtype), n.gradient_dtype)},
      {state_class_name(StateClass::kMaster), flat * master,
       master == 2   ? "low half beside the weight"
       : master == 4 ? "fp32"
                     : "none"},
      {state_class_name(StateClass::kFirstMoment), flat * 4, "fp32"},
      {state_class_name(StateClass::kSecondMoment), flat * 4, "fp32"},
      {state_class_name(StateClass::kActivations), plan.arena.saved,
       n.recompute ? "block inputs" : "saved by every block"},
      {"temporaries", plan.arena.bytes - plan.arena.saved,
       "logits of " + std::to_string(n.row_chunk) + " rows at once: " + format_bytes(plan.arena.logits)},
      {"embedding rows", rows, "fp32 sums of a step's distinct tokens"},
      {"libraries", base,
       in.device == DeviceType::kCpu ? "LibTorch and GEMM workspaces" : "CUDA context, cuBLAS"},
  };
  int64_t total = 0;
  for (const ClassBytes& row : plan.classes) total += row.bytes;
  plan.peak = in.device == DeviceType::kCpu ? PeakBytes{0, total, 0} : PeakBytes{total, kCudaBase, 0};
}

double rate_or(double measured, double fallback) {
  return measured > 0 ? measured : fallback;
}

void fill_times(const Costing& in, Plan& plan) {
  const bool lora = in.adapter != nullptr, bf16 = plan.numerics.dtype == DType::kBF16;
  const double cores = in.machine.cores;
  double flops = 0, bandwidth = 0;
  if (in.device == DeviceType::kCpu) {
    flops = bf16 ? rate_or(in.machine.gemm_bf16_flops, kGemmBf16PerCore * cores)
                 : rate_or(in.machine.gemm_fp32_flops, kGemmFp32PerCore * cores);
    bandwidth = rate_or(in.machine.memory_bandwidth, kBandwidthPerCore * cores);
  } else {
    const Gpu& gpu = in.machine.gpus.front();
    flops = bf16 ? rate_or(gpu.bf16_flops, 100e12) : rate_or(gpu.fp32_flops, 20e12);
    bandwidth = rate_or(gpu.bandwidth, 500e9);
  }
  const int64_t length = in.config.data.max_length;
  plan.sol_seconds_per_token = necessary_flops(in.spec, in.layout, lora, length) / flops;
  const double tokens = static_cast<double>(in.config.train.global_batch * length);
  // Recomputation repeats the forward: one more third (LoRA: half) of the necessary work.
  const double again = plan.numerics.recompute ? (lora ? 1.5 : 4.0 / 3.0) : 1.0;
  const double compute = tokens * plan.sol_seconds_per_token * again;
  // Per token and layer some 40 H + 12 F elements pass through norms, RoPE, SwiGLU and attention's edges; per
  // parameter the fused update reads and writes 28 B and a gradient is added once per micro-batch.
  const double elements =
      static_cast<double>(in.spec.layers * (40 * in.spec.hidden + 12 * in.spec.ffn) + 3 * in.spec.vocab);
  const double adds =
      static_cast<double>(plan.numerics.micro_batches * (2 * size_of(plan.numerics.gradient_dtype) + 2));
  const double memory = (tokens * elements * static_cast<double>(size_of(plan.numerics.dtype)) +
                         static_cast<double>(in.layout.flat_elements) * (28 + adds)) /
                        bandwidth;
  plan.links = {{"GEMM and attention", compute}, {"memory", memory}};
  plan.step_seconds = compute + memory;
  plan.binding = compute >= memory ? "compute" : "memory bandwidth";
}

int64_t budget(const Costing& in) {
  const int64_t have =
      in.device == DeviceType::kCpu ? in.machine.host_available : in.machine.gpus.front().memory_bytes;
  return static_cast<int64_t>(kUsableShare * static_cast<double>(have));
}

int64_t need(const Plan& plan, DeviceType device) {
  return device == DeviceType::kCpu ? plan.peak.host : plan.peak.device;
}

// The plan with one setting changed, to tell how many bytes it would save.
int64_t need_with(const Costing& in, const Plan& plan, int64_t micro_batch, bool recompute,
                  DType gradient_dtype) {
  Plan other = plan;
  other.numerics.micro_batch = micro_batch;
  other.numerics.recompute = recompute;
  other.numerics.gradient_dtype = gradient_dtype;
  fill_bytes(in, other);
  return need(other, in.device);
}

[[noreturn]] void refuse(const Costing& in, const Plan& plan) {
  const int64_t wanted = need(plan, in.device);
  std::string table;
  for (const ClassBytes& row : plan.classes) {
    if (row.bytes > 0) table += "\n    " + row.name + ": " + format_bytes(row.bytes);
  }
  std::string next;
  const auto knob = [&](const std::string& setting, int64_t bytes) {
    if (bytes >= wanted) return;
    next += (next.empty() ? "" : "; ") + setting + " saves " + format_bytes(wanted - bytes) +
            (bytes <= budget(in) ? " and fits" : "");
  };
  const NumericsPlan& n = plan.numerics;
  if (!n.recompute) {
    knob("train.recompute = \"block\"", need_with(in, plan, n.micro_batch, true, n.gradient_dtype));
  }
  if (n.micro_batch > 1) knob("train.micro_batch = 1", need_with(in, plan, 1, n.recompute, n.gradient_dtype));
  if (n.gradient_dtype == DType::kF32 && in.adapter == nullptr) {
    knob("train.gradients = \"bf16\"", need_with(in, plan, n.micro_batch, n.recompute, DType::kBF16));
  }
  if (in.adapter == nullptr) {
    const int64_t weights = in.layout.flat_elements * size_of(n.dtype);
    knob("train.method = \"lora\"", weights + plan.arena.bytes + kCpuBase);
  }
  if (in.config.data.max_length > 512) {
    Config shorter = in.config;
    shorter.data.max_length /= 2;
    const Costing changed{shorter, in.spec, in.adapter, in.layout, in.machine, in.device};
    knob("data.max_length = " + std::to_string(shorter.data.max_length),
         need_with(changed, plan, n.micro_batch, n.recompute, n.gradient_dtype));
  }
  throw Error(Exit::kDoesNotFit,
              {.area = in.device == DeviceType::kCpu ? "MEM-16" : "MEM-15",
               .what = std::string("the run does not fit: it needs ") + format_bytes(wanted) + " of " +
                       (in.device == DeviceType::kCpu ? "host" : "GPU") + " memory, " +
                       format_bytes(budget(in)) + " may be used" + table,
               .place = "",
               .next = next.empty() ? "use a machine with more memory" : next,
               .kept = ""});
}

bool fits(const Costing& in, Plan& plan) {
  fill_bytes(in, plan);
  return need(plan, in.device) <= budget(in);
}

// Divisors of the global batch, largest first.
std::vector<int64_t> micro_batch_candidates(int64_t global_batch) {
  std::vector<int64_t> out;
  for (int64_t m = global_batch; m >= 1; --m) {
    if (global_batch % m == 0) out.push_back(m);
  }
  return out;
}

void choose_micro_batch(const Costing& in, Plan& plan) {
  NumericsPlan& n = plan.numerics;
  const int64_t length = in.config.data.max_length;
  const int64_t wanted_tokens = in.device == DeviceType::kCpu ? kCpuMicroTokens : kGpuMicroTokens;
  const std::vector<bool> policies = in.config.train.recompute == Recompute::kAuto
                                         ? std::vector<bool>{false, true}
                                         : std::vector<bool>{in.config.train.recompute == Recompute::kBlock};
  for (const bool recompute : policies) {
    n.recompute = recompute;
    for (const int64_t m : micro_batch_candidates(in.config.train.global_batch)) {
      if (m > 1 && m * length > wanted_tokens) continue;
      n.micro_batch = m;
      if (!fits(in, plan)) continue;
      plan.choices.push_back(
          {"train.micro_batch", std::to_string(m),
           "divides global_batch, up to " + std::to_string(wanted_tokens) + " tokens at once, and fits"});
      return;
    }
  }
  n.micro_batch = 1;
  fill_bytes(in, plan);
  refuse(in, plan);
}

void choose_recompute(const Costing& in, Plan& plan) {
  NumericsPlan& n = plan.numerics;
  n.micro_batch = *in.config.train.micro_batch;
  n.recompute = in.config.train.recompute == Recompute::kBlock;
  if (fits(in, plan)) return;
  if (in.config.train.recompute == Recompute::kAuto) {
    n.recompute = true;
    if (fits(in, plan)) return;
    n.recompute = false;
    fill_bytes(in, plan);
  }
  refuse(in, plan);
}

}  // namespace

const char* state_class_name(StateClass state) {
  constexpr const char* kNames[] = {"weights",      "frozen weights", "gradients",  "master",
                                    "first moment", "second moment",  "activations"};
  return kNames[static_cast<size_t>(state)];
}

double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, bool lora, int64_t sequence) {
  double blocks = 0, adapters = 0;
  for (size_t b = 1; b + 1 < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      if (place.parameter.vector()) continue;
      (place.frozen || !lora ? blocks : adapters) += static_cast<double>(place.parameter.elements());
    }
  }
  const double head = static_cast<double>(spec.vocab * spec.hidden);
  const double attention = static_cast<double>(spec.layers * spec.q_rows() * sequence);
  return lora ? 4 * (blocks + head) + 6 * adapters + 6 * attention : 6 * (blocks + head + attention);
}

Plan make_plan(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
               const ModelLayout& layout, const Machine& machine, DeviceType device) {
  const Costing in{config, spec, adapter, layout, machine, device};
  Plan plan;
  NumericsPlan& n = plan.numerics;
  n.dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  n.gradient_dtype = config.train.gradients == GradientDType::kF32 ? DType::kF32 : DType::kBF16;
  n.row_chunk = kRowChunk;
  n.threads = static_cast<int>(config.run.threads.value_or(machine.cores));
  plan.placement.device = device;
  plan.placement.optimizer_threads = static_cast<int>(config.optimizer.threads.value_or(n.threads));
  if (!config.run.threads) {
    plan.choices.push_back({"run.threads", std::to_string(n.threads), "the cores this process may use"});
  }
  if (config.train.micro_batch) {
    choose_recompute(in, plan);
  } else {
    choose_micro_batch(in, plan);
  }
  if (config.train.recompute == Recompute::kAuto) {
    plan.choices.push_back({"train.recompute", n.recompute ? "block" : "none",
                            n.recompute ? "saved activations would not fit" : "saved activations fit"});
  }
  n.micro_batches = ceil_div(config.train.global_batch, n.micro_batch);
  fill_times(in, plan);
  return plan;
}

}  // namespace lm
