#include "plan/upgrades.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "plan/estimate.h"

namespace lm {
namespace {

struct Change {
  const char* text;
  std::function<void(Machine&)> apply;
};

// The disks that the estimate has, as values: defaults where none was measured.
void add_disk(Machine& machine) {
  const LinkRates rates = link_rates(machine, DeviceType::kCpu);
  if (machine.disks.empty()) machine.disks.emplace_back();
  const auto count = static_cast<double>(machine.disks.size());
  if (rates.assumed) {
    for (Disk& disk : machine.disks)
      disk.read_bandwidth = rates.disk_read / count, disk.write_bandwidth = rates.disk_write / count;
  }
  machine.disks.push_back(machine.disks.front());
}

void double_gpu_memory(Machine& machine) {
  for (Gpu& gpu : machine.gpus) {
    if (gpu.free_bytes > 0) gpu.free_bytes += gpu.memory_bytes;
    gpu.memory_bytes *= 2;
  }
}

void double_host_memory(Machine& machine) {
  machine.host_available += machine.host_capacity();
  machine.host_memory *= 2;
  machine.host_limit *= 2;
}

std::vector<Change> changes(const PlanInputs& inputs, const Machine& share, const Plan& plan) {
  std::vector<Change> out;
  if (plan.world.nodes > 1) {
    const double between = rank_links(share, inputs.device).between;
    out.push_back({"a second network adapter", [=](Machine& m) { m.network_bandwidth = 2 * between; }});
  }
  const bool disks = !inputs.config.offload.paths.empty() && (plan.placement.on_disk() || !plan.fits);
  if (disks) out.push_back({"one more disk", add_disk});
  if (inputs.device == DeviceType::kCuda) out.push_back({"twice the GPU memory", double_gpu_memory});
  if (share.host_capacity() > 0) out.push_back({"twice the host memory", double_host_memory});
  return out;
}

std::string seconds_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

// Less than what an estimate knows.
bool as_before(const Upgrade& row) {
  return row.fits && row.speedup > 0.995 && row.speedup < 1.005;
}

std::string gpu_assumption(const Machine& share, const ComputeRates& rates) {
  const Gpu& gpu = share.gpus.front();
  const std::string name = gpu.name.empty() ? "the GPU" : gpu.name;
  const std::string measured = gpu.bf16_flops > 0 && gpu.bandwidth > 0
                                   ? "of its nominal"
                                   : "of a GPU of which only the memory is known,";
  return fmt::format("{}: products at {:.0f} TFLOP/s {} {:.0f}, attention at {:.0f}, memory at {:.0f} GB/s",
                     name, rates.gemm_flops / 1e12, measured, rates.peak_flops / 1e12,
                     rates.attention_flops / 1e12, rates.bandwidth / 1e9);
}

void assume_links(const PlanInputs& inputs, const Machine& share, const Plan& plan,
                  std::vector<std::string>& out) {
  const World& world = plan.world;
  const bool gpu = inputs.device == DeviceType::kCuda;
  const RankLinks links = rank_links(share, inputs.device);
  if (gpu && world.ranks_per_node() > 1)
    out.push_back(fmt::format("from GPU to GPU {:.0f} GB/s each way{}", links.inside / 1e9,
                              share.gpus.front().peer_bandwidth > 0 ? "" : ", not measured"));
  if (world.nodes > 1)
    out.push_back(fmt::format("from machine to machine {:.0f} GB/s each way, all ranks of one together{}",
                              links.between / 1e9, share.network_bandwidth > 0 ? "" : ", not measured"));
  const LinkRates rates = link_rates(share, inputs.device);
  if (gpu && plan.timeline.link_bytes > 0)
    out.push_back(fmt::format("from host memory to each GPU {:.0f} GB/s each way{}", rates.link / 1e9,
                              share.gpus.front().link_bandwidth > 0 ? "" : ", not measured"));
  if (plan.placement.on_disk())
    out.push_back(fmt::format("disks read {:.2f} and write {:.2f} GB/s for each rank{}",
                              rates.disk_read / 1e9, rates.disk_write / 1e9,
                              rates.assumed ? ", not measured" : ""));
}

}  // namespace

std::vector<Upgrade> estimate_upgrades(const PlanInputs& inputs, const Machine& share, const Plan& plan) {
  std::vector<Upgrade> out;
  const double before = tokens_per_second(plan);
  for (const Change& change : changes(inputs, share, plan)) {
    Machine machine = share;
    change.apply(machine);
    const Plan other = draft_plan(inputs, machine, plan.world);
    Upgrade& row = out.emplace_back();
    row = {.change = change.text,
           .fits = other.fits,
           .step_seconds = other.step_seconds,
           .tokens_per_second = tokens_per_second(other),
           .binding = other.binding};
    if (plan.fits && before > 0) row.speedup = row.tokens_per_second / before;
  }
  return out;
}

std::string print_upgrades(const Plan& plan, const std::vector<Upgrade>& upgrades) {
  const auto bound = std::ranges::find(plan.links, plan.binding, &LinkTime::name);
  std::string out = "what binds, and what would change it\n";
  const auto add = [&](const std::string& name, const std::string& value, const std::string& note) {
    out += fmt::format("  {:<24} {:>10}   {}\n", name, value, note);
  };
  if (bound != plan.links.end())
    add(plan.binding, seconds_text(bound->seconds),
        "of a step of " + seconds_text(plan.step_seconds) + ", beside which the others pass");
  for (const Upgrade& row : upgrades) {
    if (!row.fits) {
      add(row.change, "-", "does not fit");
    } else if (as_before(row)) {
      add(row.change, seconds_text(row.step_seconds), "no change");
    } else {
      add(row.change, seconds_text(row.step_seconds),
          fmt::format("{:.0f} tokens/s, {:.2f}x, bound by {}", row.tokens_per_second, row.speedup,
                      row.binding));
    }
  }
  return out;
}

std::string upgrades_json(const std::vector<Upgrade>& upgrades) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const Upgrade& row : upgrades) {
    out.push_back({{"change", row.change},
                   {"fits", row.fits},
                   {"step_seconds", row.step_seconds},
                   {"tokens_per_s", row.tokens_per_second},
                   {"speedup", row.speedup > 0 ? nlohmann::ordered_json(row.speedup) : nullptr},
                   {"binding", row.binding}});
  }
  return out.dump();
}

std::vector<std::string> plan_assumptions(const PlanInputs& inputs, const Machine& share, const Plan& plan) {
  std::vector<std::string> out;
  const ComputeRates rates = compute_rates(share, inputs.device, plan.numerics.dtype, plan.numerics.products);
  if (inputs.device == DeviceType::kCuda) {
    out.push_back(gpu_assumption(share, rates));
  } else {
    out.push_back(fmt::format("{} cores: products at {:.0f} GFLOP/s, memory at {:.0f} GB/s{}", share.cores,
                              rates.gemm_flops / 1e9, rates.bandwidth / 1e9,
                              rates.assumed ? ", not measured" : ""));
  }
  assume_links(inputs, share, plan, out);
  out.push_back(
      plan.sequence_tokens > 0
          ? fmt::format("sequences of {:.0f} tokens on average, as the data's are", plan.sequence_tokens)
          : fmt::format("sequences of data.max_length = {} tokens each", inputs.config.data.max_length));
  return out;
}

}  // namespace lm
