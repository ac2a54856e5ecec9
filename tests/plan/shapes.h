// Models and machines for the tests of src/plan: published shapes, written down by hand.
#pragma once

#include <utility>

#include "plan/base_encoding.h"
#include "plan/parallel_experts.h"
#include "plan/plan.h"
#include "plan/trained_tensors.h"
#include "spec/block_layout.h"
#include "tests/support/llama_spec.h"

namespace lm {

inline ModelSpec make_spec(const ModelSizes& sizes, bool tied = true) {
  ModelSpec spec = llama_spec(sizes);
  spec.tied = tied;
  return spec;
}

inline ModelSpec llama_1b() {
  return make_spec({2048, 8192, 16, 32, 8, 64, 128256});
}
inline ModelSpec llama_8b() {
  return make_spec({4096, 14336, 32, 32, 8, 128, 128256}, false);
}
inline ModelSpec smollm2_135m() {
  return make_spec({576, 1536, 30, 9, 3, 64, 49152});
}

inline AdapterSpec adapter_r16() {
  return {.r = 16,
          .alpha = 32,
          .rslora = false,
          .dropout = 0,
          .targets = resolve_targets(llama_names(), {"all-linear"}, "test")};
}

inline Machine cpu_machine(int64_t host_gib) {
  Machine machine;
  machine.cores = 2;
  machine.host_memory = host_gib * (int64_t{1} << 30);
  machine.gemm_bf16_flops = 350e9;
  machine.gemm_fp32_flops = 175e9;
  machine.memory_bandwidth = 20e9;
  return machine;
}

inline Machine gpu_machine(const char* name) {
  Machine machine = cpu_machine(64);
  machine.gpus.push_back(built_in_gpu(name));
  return machine;
}

// Everything on the device, whatever it costs.
inline void stay_near(Config& config) {
  OffloadConfig& o = config.offload;
  o.optimizer = o.gradients = o.weights = o.activations = OffloadTier::kNone;
}

// A configuration, its model and its machine, planned.
struct Case {
  Config config = {};
  ModelSpec spec = smollm2_135m();
  Machine machine = cpu_machine(16);
  DeviceType device = DeviceType::kCpu;
  PlanPurpose purpose = PlanPurpose::kTrain;
  const NumericsPlan* recorded = nullptr;
  DataShape data = {};
  World world = {};  // `machine` is a rank's share
  AdapterSpec lora = adapter_r16();
  std::optional<bool> update_on_host = {};

  Plan draft() const { return make(&draft_plan); }
  Plan plan() const { return make(&make_plan); }
  Plan make(decltype(&make_plan) how) const {
    const AdapterSpec* adapter = config.train.method == Method::kLora ? &lora : nullptr;
    return how({config, spec, adapter, layout(adapter), device, data, update_on_host, recorded}, machine,
               world, purpose);
  }
  ModelLayout layout(const AdapterSpec* adapter) const {
    return make_layout(spec, adapter, config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32,
                       base_encoding(config.model), trained_filter(config.train, spec),
                       expert_share(config, world, 0));
  }
};

// Of ranks on a large machine, 8 sequences each.
inline Case stage_case(int64_t stage, int ranks, ModelSpec spec = llama_1b()) {
  Case c{.spec = std::move(spec), .machine = cpu_machine(256)};
  c.config.zero.stage = stage;
  c.config.train.global_batch = 8 * ranks;
  c.config.train.micro_batch = 8;
  c.config.train.recompute = Recompute::kBlock;
  c.world.ranks = ranks;
  return c;
}

inline int64_t class_bytes(const Plan& plan, const std::string& name) {
  for (const ClassBytes& row : plan.classes) {
    if (row.name == name) return row.bytes;
  }
  return -1;
}

}  // namespace lm
