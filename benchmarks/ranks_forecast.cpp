// Our side of ranks_forecast.py: a step of many ranks as the plan estimates it and as a simulation that walks
// all of them takes it. No rank runs. A line of JSON for each case.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/clock.h"
#include "config/config_toml.h"
#include "tests/support/llama_spec.h"
#include "tests/support/oracles/simulate.h"

namespace {

using namespace lm;

// Llama-3.1-8B's.
ModelSpec llama_8b() {
  return llama_spec({.hidden = 4096,
                     .ffn = 14336,
                     .layers = 32,
                     .heads = 32,
                     .kv_heads = 8,
                     .head_dim = 128,
                     .vocab = 128256});
}

void judge(const World& world, int64_t stage, const char* tier_id) {
  const ModelSpec spec = llama_8b();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  Config config = parse_config("[model]\npath = \"none\"\n[data]\ntrain = [\"none\"]\n", "benchmark",
                               {std::string("offload.optimizer=") + tier_id, "offload.paths=[\"/swap\"]"});
  config.zero.stage = stage;
  config.train.global_batch = 4 * world.ranks;
  Machine node;
  node.cores = 128;
  node.host_memory = 2048 * kGiB;
  node.memory_bandwidth = 400e9;
  node.gpus.push_back(built_in_gpu("H100"));
  node.disks = {{"/swap", 8192 * kGiB, 24e9, 20e9}};
  const Machine machine = share_of_machine(node, world.ranks_per_node());
  const PlanInputs inputs{config, spec, nullptr, layout, DeviceType::kCuda, {}, {}, nullptr};
  const Plan plan = draft_plan(inputs, machine, world);
  const double start = monotonic_seconds();
  const Simulation even = simulate_step(inputs, machine, plan);
  const double took = monotonic_seconds() - start;
  const Simulation late = simulate_step(inputs, machine, plan, {.seed = 1, .share = 0.01, .slowdown = 1.2});
  std::printf("%s\n", nlohmann::json{{"ranks", world.ranks},
                                     {"nodes", world.nodes},
                                     {"stage", stage},
                                     {"optimizer", tier_id},
                                     {"forecast", plan.step_seconds},
                                     {"simulated", even.seconds},
                                     {"bound", even.bound},
                                     {"stragglers", late.seconds},
                                     {"took", took}}
                          .dump()
                          .c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char**) {
  for (const lm::World& world :
       {lm::World{8, 1}, lm::World{64, 8}, lm::World{512, 64}, lm::World{4096, 512}}) {
    if (argc > 1 && world.ranks > 64 && world.ranks < 4096) continue;  // --smoke
    for (const int64_t stage : {1, 3}) {
      for (const char* const tier_id : {"none", "host", "nvme"}) judge(world, stage, tier_id);
    }
  }
}
