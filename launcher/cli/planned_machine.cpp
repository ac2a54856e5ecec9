#include "launcher/cli/planned_machine.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "launcher/cli/imagined_gpu.h"
#include "launcher/environment.h"

namespace lm {
namespace {

constexpr int64_t kMostPlanned = 1 << 16;  // ranks

// A file's machine has so many GPUs, of which each rank takes one.
int64_t default_nodes(const PlannedMachine& planned, const CommandLine& line, int64_t ranks) {
  const auto each = static_cast<int64_t>(planned.machine.gpus.size());
  if (planned.file.empty() || each == 0 || !line.has("--gpus") || ranks % each != 0) return 1;
  return ranks / each;
}

World world_of(const CommandLine& line, const PlannedMachine& planned) {
  const auto gpus = line.integer("--gpus"), processes = line.integer("--ranks");
  const LauncherJob job = planned.file.empty() ? read_launcher_job() : LauncherJob{};
  // --gpus 0 selects the device of the ranks, not their number.
  const int64_t asked = processes.value_or(gpus.value_or(0));
  const int64_t ranks = asked > 0 ? asked : job.ranks;
  const int64_t nodes = line.integer("--nodes").value_or(
      ranks == job.ranks ? job.machines : default_nodes(planned, line, ranks));
  if (processes && gpus.value_or(0) > 0)
    throw usage_error("--ranks are processes on the CPU, and --gpus asks for GPUs", "leave out one of them");
  if (ranks > kMostPlanned)
    throw usage_error(fmt::format("{} ranks: more than {}", ranks, kMostPlanned), "plan for fewer");
  if (nodes < 1 || ranks % nodes != 0) {
    throw usage_error(
        fmt::format("--nodes {}: {} ranks cannot be on so many machines, equally many on each", nodes, ranks),
        "give --gpus or --ranks N and --nodes M so that M divides N");
  }
  return {static_cast<int>(ranks), static_cast<int>(nodes)};
}

// The machine of the file has so many GPUs and no more, unless another card is imagined in it.
void refuse_more_gpus(const CommandLine& line, const PlannedMachine& planned) {
  const auto each = static_cast<int64_t>(planned.machine.gpus.size());
  const int64_t gpus = line.integer("--gpus").value_or(0);
  if (planned.file.empty() || imagined_gpu(line) || gpus == 0) return;
  if (each == 0)
    throw usage_error(fmt::format("--gpus {}: the machine of {} has no GPU", gpus, planned.file),
                      "leave it out, or name a card with --gpu");
  if (planned.world.ranks_per_node() <= each) return;
  throw usage_error(fmt::format("{} GPUs on each machine: that of {} has {}", planned.world.ranks_per_node(),
                                planned.file, each),
                    fmt::format("give --gpus N and --nodes M so that N / M is at most {}", each));
}

// Sets the links between ranks from the command line; and a GPU, if several are planned and none is there.
void imagine_links(const CommandLine& line, Machine& machine) {
  if (line.integer("--gpus").value_or(1) > 1 && machine.gpus.empty()) {
    machine.gpus.push_back(built_in_gpu("H100"));
    log_note("DEV-34", "no GPU is here: planning for H100s of 80 GB; --gpu-memory SIZE plans for others");
  }
  for (Gpu& gpu : machine.gpus)
    gpu.peer_bandwidth =
        static_cast<double>(line.bytes("--gpu-link").value_or(static_cast<int64_t>(gpu.peer_bandwidth)));
  machine.network_bandwidth = static_cast<double>(
      line.bytes("--node-link").value_or(static_cast<int64_t>(machine.network_bandwidth)));
}

// As it is when nothing else runs on it: what was free when the file was made says nothing of a job's
// machines.
Machine idle(Machine machine) {
  machine.host_available = machine.host_capacity();
  for (Gpu& gpu : machine.gpus) gpu.free_bytes = 0;
  return machine;
}

std::string describe(const Machine& machine) {
  std::string out = fmt::format("{} cores, {}", machine.cores, format_bytes(machine.host_capacity()));
  if (!machine.gpus.empty()) out += fmt::format(", {} x {}", machine.gpus.size(), machine.gpus.front().name);
  return out;
}

}  // namespace

bool imagines_gpus(const CommandLine& line) {
  return imagined_gpu(line) || line.integer("--gpus").value_or(1) > 1;
}

PlannedMachine planned_machine(const CommandLine& line, const SurveyedGpus& found) {
  PlannedMachine out;
  out.file = line.value("--machine").value_or("");
  out.machine = out.file.empty() ? survey_machine(found.visible.gpus) : idle(read_machine_file(out.file));
  if (!out.file.empty()) out.described = describe(out.machine);
  // Before an imagined GPU takes the place of all that are there.
  out.world = world_of(line, out);
  refuse_more_gpus(line, out);
  const std::optional<int64_t> host = line.bytes("--host-memory");
  if (host) out.described += ", but " + format_bytes(*host) + " of memory";
  out.machine = with_imagined(std::move(out.machine), {imagined_gpu(line), host});
  imagine_links(line, out.machine);
  out.imagined = !out.file.empty() || imagines_gpus(line) || line.has("--host-memory") || out.world.nodes > 1;
  return out;
}

std::vector<Disk> disks_of_file(const PlannedMachine& planned, const Config& config) {
  std::vector<Disk> left = planned.machine.disks, out;
  if (config.offload.paths.size() > left.size()) {
    throw usage_error(fmt::format("offload.paths names {} directories, and the machine of {} has {} {}",
                                  config.offload.paths.size(), planned.file, left.size(),
                                  left.size() == 1 ? "disk" : "disks"),
                      "describe it by `lmlaunch doctor --json --path DIR`, with --path for each of them");
  }
  std::vector<std::string> unnamed;
  for (const std::string& path : config.offload.paths) {
    const auto named = std::ranges::find(left, path, &Disk::path);
    if (named == left.end()) {
      unnamed.push_back(path);
      continue;
    }
    out.push_back(*named);
    left.erase(named);
  }
  for (size_t i = 0; i < unnamed.size(); ++i) {
    out.push_back(left[i]);
    out.back().path = unnamed[i];
  }
  return out;
}

std::vector<std::string> machine_assumptions(const PlannedMachine& planned) {
  std::vector<std::string> out;
  if (!planned.file.empty())
    out.push_back(fmt::format("the machine of {} ({}), with nothing else running on it", planned.file,
                              planned.described));
  if (planned.world.nodes > 1)
    out.push_back(fmt::format("{} equal machines with {} {} each", planned.world.nodes,
                              planned.world.ranks_per_node(),
                              planned.world.ranks_per_node() == 1 ? "rank" : "ranks"));
  return out;
}

}  // namespace lm
