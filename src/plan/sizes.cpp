#include "plan/sizes.h"

#include <algorithm>
#include <limits>

#include "base/bytes.h"

namespace lm {
namespace {

// Resident memory of lmlaunch-cpu | -cuda before the first weight: libraries, thread stacks, GEMM workspaces.
constexpr int64_t kCpuBase = 190 * kMiB;
constexpr int64_t kCudaBase = 900 * kMiB;
// Set aside on a GPU for the CUDA context, cuBLAS workspaces and what ATen's attention allocates itself.
constexpr int64_t kGpuReserve = 1 * kGiB;
constexpr double kUsableShare = 0.9;        // of a capacity
constexpr int64_t kStepBytesPerToken = 20;  // of a step's batches in host memory (data/batch.h)

int64_t size_of(DType type) {
  return static_cast<int64_t>(dtype_size(type));
}

ActivationShape activation_shape(const PlanInput& in, const NumericsPlan& numerics) {
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

std::string per_parameter(DType type) {
  return std::string(dtype_name(type)) + ", " + std::to_string(size_of(type)) + " B per parameter";
}

// cos and sin, granule norms, batches, and the order in which a step's tokens reach their rows.
int64_t table_bytes(const PlanInput& in, const NumericsPlan& n, int64_t step_tokens, int64_t rows) {
  int64_t bytes = 4 * in.spec.head_dim * in.config.data.max_length + in.layout.flat_elements / kGranule * 8 +
                  step_tokens * kStepBytesPerToken;
  if (in.adapter == nullptr) bytes += 4 * (in.spec.vocab + step_tokens + n.micro_batches * rows);
  return bytes;
}

std::vector<ClassBytes> classes_of(const PlanInput& in, const Plan& plan) {
  const NumericsPlan& n = plan.numerics;
  const int64_t flat = in.layout.flat_elements, master = master_size(n.master, n.dtype);
  const int64_t step_tokens = in.config.train.global_batch * in.config.data.max_length;
  const int64_t rows = in.adapter == nullptr ? std::min(in.spec.vocab, step_tokens) : 0;
  const bool cpu = in.device == DeviceType::kCpu;
  const Home near = cpu ? Home::kHost : Home::kDevice;
  std::vector<ClassBytes> out = {
      {state_class_name(StateClass::kWeights), flat * size_of(n.dtype), per_parameter(n.dtype), near},
      {state_class_name(StateClass::kFrozenWeights), in.layout.frozen_bytes, dtype_name(n.dtype), near},
      {state_class_name(StateClass::kGradients), flat * size_of(n.gradient_dtype),
       per_parameter(n.gradient_dtype), near},
      {state_class_name(StateClass::kMaster), flat * master,
       master == 2   ? "low half beside the weight"
       : master == 4 ? "fp32"
                     : "none",
       near},
      {state_class_name(StateClass::kFirstMoment), flat * 4, "fp32", near},
      {state_class_name(StateClass::kSecondMoment), flat * 4, "fp32", near},
      {state_class_name(StateClass::kActivations), plan.arena.saved,
       n.recompute ? "block inputs" : "saved by every block", near},
      {"temporaries", plan.arena.bytes - plan.arena.saved,
       "logits of " + std::to_string(std::min(n.row_chunk, plan.micro_tokens)) +
           " rows at once: " + format_bytes(plan.arena.logits),
       near},
      {"embedding rows", rows * in.spec.hidden * 4, "fp32 sums of a step's distinct tokens", near},
      {"tables", table_bytes(in, n, step_tokens, rows), "angles, norms, order of tokens, batches", near},
  };
  if (!cpu) out.push_back({"reserve", kGpuReserve, "CUDA context, cuBLAS, attention's own", Home::kDevice});
  out.push_back({"libraries", cpu ? kCpuBase : kCudaBase,
                 cpu ? "LibTorch and GEMM workspaces" : "LibTorch, CUDA", Home::kHost});
  return out;
}

Tier make_tier(Home home, const std::vector<ClassBytes>& classes, int64_t capacity, int64_t free_now) {
  Tier tier{.home = home, .bytes = 0, .capacity = capacity, .usable = std::numeric_limits<int64_t>::max()};
  for (const ClassBytes& row : classes) {
    if (row.home == home) tier.bytes += row.bytes;
  }
  if (capacity > 0) tier.usable = static_cast<int64_t>(kUsableShare * static_cast<double>(capacity));
  if (free_now > 0) tier.usable = std::min(tier.usable, free_now);
  return tier;
}

}  // namespace

int64_t master_size(Master master, DType dtype) {
  if (dtype == DType::kF32 || master == Master::kNone) return 0;
  return master == Master::kSplit ? 2 : 4;
}

void size_plan(const PlanInput& in, Plan& plan) {
  plan.micro_tokens = plan.numerics.micro_batch * in.config.data.max_length;
  plan.numerics.micro_batches = ceil_div(in.config.train.global_batch, plan.numerics.micro_batch);
  plan.arena = arena_need(in.spec, in.adapter, activation_shape(in, plan.numerics));
  plan.classes = classes_of(in, plan);
  plan.tiers.clear();
  plan.peak = {};
  if (in.device == DeviceType::kCuda) {
    const Gpu& gpu = in.machine.gpus.front();
    plan.tiers.push_back(make_tier(Home::kDevice, plan.classes, gpu.memory_bytes, gpu.free_bytes));
    plan.peak.device = plan.tiers.back().bytes;
  }
  plan.tiers.push_back(
      make_tier(Home::kHost, plan.classes, in.machine.host_capacity(), in.machine.host_available));
  plan.peak.host = plan.tiers.back().bytes;
  plan.fits = std::all_of(plan.tiers.begin(), plan.tiers.end(),
                          [](const Tier& tier) { return tier.bytes <= tier.usable; });
}

bool fits_capacity(const Plan& plan) {
  return std::all_of(plan.tiers.begin(), plan.tiers.end(), [](const Tier& tier) {
    return tier.capacity <= 0 ||
           tier.bytes <= static_cast<int64_t>(kUsableShare * static_cast<double>(tier.capacity));
  });
}

}  // namespace lm
