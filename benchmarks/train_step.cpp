// Our side of train_step.py, offload_step.py, plan_honest.py and resident_instructions.py: one optimizer step
// per line of input, on random weights and tokens.
//
//   train_step_bench SHAPE_JSON full|lora|qlora fp32|bf16 THREADS SEQUENCES LENGTH [KEY=VALUE ...]
//
// KEY=VALUE are settings of the configuration, slots=N the optimizer's slots, disk_gb_per_s=R the speed of a
// simulated disk, gemm_tflops=R the speed of the cores, which is measured, with memory's, where it is not
// told, and rates=each measures the cores again before every step, since others use the machine, too. Prints
// "ready", then per step one JSON line {ms, loss, peak_rss, read_bytes, wait_ms, planned}.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "config/config_names.h"
#include "config/config_toml.h"
#include "kernels/cpu_rates.h"
#include "kernels/gemm_rate.h"
#include "offload/copy_probe.h"
#include "offload/disk_probe.h"
#include "synthetic_run.h"
#include "tests/support/sim_disk.h"
#include "train/metrics.h"

namespace {

using namespace lm;

// The command line.
struct Arguments {
  ModelSpec spec;
  bool lora = false;
  Config config;
  int64_t slots = 0;         // of the optimizer; 0: as planned
  double disk_gb_per_s = 0;  // of a simulated disk; 0: the real one
  double gemm_tflops = 0;    // 0: measured
  bool rates_each = false;   // before every step
};

Arguments parse_arguments(int argc, char** argv) {
  Arguments out;
  out.spec = parse_model_spec(argv[1], "the command line");
  std::vector<std::string> settings = {"train.method=" + std::string(argv[2])};
  for (int i = 7; i < argc; ++i) {
    const std::string setting = argv[i], value = setting.substr(setting.find('=') + 1);
    if (setting.starts_with("slots=")) {
      out.slots = std::stoll(value);
    } else if (setting.starts_with("disk_gb_per_s=")) {
      out.disk_gb_per_s = std::stod(value);
    } else if (setting.starts_with("gemm_tflops=")) {
      out.gemm_tflops = std::stod(value);
    } else if (setting == "rates=each") {
      out.rates_each = true;
    } else {
      settings.push_back(setting);
    }
  }
  Config& config = out.config;
  config = parse_config("[model]\npath = \"none\"\n[data]\ntrain = [\"none\"]\n", "benchmark", settings);
  out.lora = config.train.method == Method::kLora;
  config.train.gradients = std::string(argv[3]) == "bf16" ? GradientDType::kBF16 : GradientDType::kF32;
  config.run.threads = std::stoll(argv[4]);
  config.train.global_batch = std::stoll(argv[5]);
  if (!config.train.micro_batch) config.train.micro_batch = config.train.global_batch;
  config.data.max_length = std::stoll(argv[6]);
  return out;
}

void measure_gemm(StreamView stream, Machine& machine) {
  const GemmRate rate = measure_gemm_rate(DType::kBF16, stream);
  machine.gemm_bf16_flops = rate.ceiling;
  machine.gemm_sustained = rate.sustained / rate.ceiling;
  const CpuRates cpu = measure_cpu_rates(DType::kBF16, stream, rate.sustained);
  machine.attention_flops = cpu.attention_flops;
  machine.gemm_call_seconds = cpu.gemm_call_seconds;
  machine.decode_bandwidth = cpu.decode_bandwidth;
}

// The median of some probes, a tenth of a second each: on a virtual machine the rate doubles and halves again
// every second or so. 32 MiB are not the peak of a small run, so that it is measured before the run alone.
double memory_bandwidth(int cores, size_t probes) {
  std::vector<double> rates(probes);
  for (double& rate : rates) rate = probe_host_memory(cores, 32 * kMiB);
  const auto middle = rates.begin() + static_cast<ptrdiff_t>(probes / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// What has moved once nothing moves any more: nothing has come to an end for as long as a tile's transfer
// takes on a disk of 200 MB/s. How much is on its way as a step ends differs from step to step.
IoCounters at_rest(const OffDeviceState& state) {
  constexpr auto kLook = std::chrono::milliseconds(100);
  IoCounters before, now = state.counters();
  do {
    before = now;
    std::this_thread::sleep_for(kLook);
    now = state.counters();
  } while (now.read_bytes != before.read_bytes || now.written_bytes != before.written_bytes);
  return now;
}

// Rates measured in this process.
Machine this_machine(const Arguments& arguments, StreamView stream) {
  const Config& config = arguments.config;
  Machine machine = roomy_machine(static_cast<int>(*config.run.threads));
  machine.library_bytes = resident_bytes();
  machine.gemm_bf16_flops = arguments.gemm_tflops * 1e12;
  if (arguments.gemm_tflops <= 0) {
    measure_gemm(stream, machine);
    machine.memory_bandwidth = memory_bandwidth(machine.cores, arguments.rates_each ? 21 : 1);
  }
  for (const std::string& path : config.offload.paths) {
    const DiskProbe probe = probe_disk(path);
    machine.disks.push_back(
        {path, probe.free_bytes, probe.read_bytes_per_s, probe.write_bytes_per_s, probe.both_bytes_per_s});
  }
  return machine;
}

// An engine on a disk in memory, of the given speed each way.
EngineFactory simulated_engine(double gb_per_s, std::unique_ptr<SimDisk>& disk) {
  if (gb_per_s <= 0) return {};
  return [gb_per_s, &disk](const EngineSetup& setup) {
    disk = std::make_unique<SimDisk>(setup.files, SimSetup{.faults = {},
                                                           .depth = setup.depth,
                                                           .read_bytes_per_s = gb_per_s * 1e9,
                                                           .write_bytes_per_s = gb_per_s * 1e9});
    return disk->make_engine();
  };
}

void run(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  const Config& config = arguments.config;
  const StreamView stream = start_torch(DeviceType::kCpu, static_cast<int>(*config.run.threads), true,
                                        planned_gemm_shapes(arguments.spec, arguments.lora, config));
  Machine machine = this_machine(arguments, stream);
  std::unique_ptr<SimDisk> simulated;  // outlives the run's queue
  SyntheticRun run({.spec = arguments.spec,
                    .lora = arguments.lora,
                    .config = config,
                    .slots = arguments.slots,
                    .engine = simulated_engine(arguments.disk_gb_per_s, simulated)},
                   machine, stream);
  const Plan& plan = run.plan();
  const OffDeviceState& off_device = run.rank().off_device();
  std::printf("ready\n");
  std::fflush(stdout);
  std::string line;
  // What moves between two steps counts for the second; with rates=each nothing does.
  IoCounters before = off_device.counters();
  while (std::getline(std::cin, line)) {
    if (arguments.rates_each) measure_gemm(stream, machine);
    const double start = monotonic_seconds(), waited = off_device.wait_seconds();
    const StepResult result = run.step();
    const double seconds = monotonic_seconds() - start;
    const IoCounters now = arguments.rates_each ? at_rest(off_device) : off_device.counters();
    std::printf("%s\n", nlohmann::json{{"ms", seconds * 1e3},
                                       {"loss", result.loss},
                                       {"peak_rss", peak_resident_bytes()},
                                       {"read_bytes", now.read_bytes - before.read_bytes},
                                       {"written_bytes", now.written_bytes - before.written_bytes},
                                       {"wait_ms", (off_device.wait_seconds() - waited) * 1e3},
                                       {"planned",
                                        {{"rss", run.planned_host_bytes()},
                                         {"peak", plan.peak.host},
                                         {"recompute", recompute_name(plan.recompute())},
                                         {"libraries", run.class_bytes("libraries")},
                                         {"disk", plan.peak.disk},
                                         {"read_bytes", plan.timeline.disk_read_bytes},
                                         {"written_bytes", plan.timeline.disk_written_bytes},
                                         {"ms", run.planned_seconds(machine) * 1e3}}}}
                            .dump()
                            .c_str());
    std::fflush(stdout);
    before = now;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "usage: train_step_bench SHAPE_JSON full|lora fp32|bf16 THREADS SEQUENCES LENGTH\n");
    return 2;
  }
  try {
    run(argc, argv);
    return 0;
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
