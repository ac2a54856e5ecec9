// What this machine has, found without torch and without starting a GPU: /proc, /sys and, where asked, NVML
// from the installed driver. Facts of one moment; sizes in bytes, 0 where unknown. Any thread may call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/gpu.h"

namespace lm {

struct MemoryLimit {
  int64_t bytes = 0;   // 0: none
  std::string source;  // the file, or "RLIMIT_AS"
};

struct CpuFacts {
  std::string model;
  int cores = 0;  // that this process may use (affinity and cgroup quota)
};

struct GpuFacts {
  std::string name, uuid;  // uuid: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", as nvidia-smi -L prints it
  int64_t memory = 0, free_memory = 0;
  std::string pci_address = "";  // "0000:17:00.0"; "" where unknown
  GpuFigures figures = {};
  int card = -1;  // of visible GPUs: its place among the cards; -1: none, as of a MIG instance
};

struct GpuSurvey {
  std::vector<GpuFacts> cards;  // in PCI order, which is nvidia-smi's; nameless where nothing describes them
  std::string problem;          // why names or memory are missing; "" when nothing is
};

struct HostFacts {
  CpuFacts cpu;
  int64_t page_bytes = 0, memory = 0, available_memory = 0;
  MemoryLimit limit;  // the smallest of cgroup (v1, v2) and RLIMIT_AS
};

// `root` is a directory to read instead of / (tests).
MemoryLimit read_memory_limit(const std::string& root = "");
// Kills for want of memory so far in this process's cgroup; without one, on this machine.
int64_t read_oom_kills(const std::string& root = "");
HostFacts survey_host(const std::string& root = "");

// GPUs that the kernel driver shows, /dev/nvidia[0-9]*: a few microseconds. Whether there is a GPU is decided
// here alone.
int count_gpus(const std::string& root = "");
// "570.86.10"; "" without a driver.
std::string gpu_driver(const std::string& root = "");
// What to do about GpuSurvey::problem.
inline constexpr char kMendNvml[] =
    "reinstall the driver's libraries (after an update of the driver: reboot)";

// As many cards as NVML lists, with names and memory (tens of milliseconds); where it lists none, as many as
// count_gpus() says, with what /proc tells. NVML knows this machine only: another `root` is read without it.
GpuSurvey survey_gpus(const std::string& root = "");

}  // namespace lm
