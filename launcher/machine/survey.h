// Hardware of this machine, found without torch and without starting a GPU: /proc, /sys and, on request, NVML
// from the installed driver. Values of one moment; sizes in bytes, 0 if unknown. Any thread may call.
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
  std::string pci_address = "";  // "0000:17:00.0"; "": unknown
  GpuFigures figures = {};
  int card = -1;  // of visible GPUs: index among the cards; -1: none, as of a MIG instance
};

struct GpuSurvey {
  std::vector<GpuFacts>
      cards;            // in PCI order, which is nvidia-smi's; without names if nothing describes them
  std::string problem;  // why names or memory are missing; "": they are not
};

struct HostFacts {
  CpuFacts cpu;
  int64_t memory = 0, available_memory = 0;
  MemoryLimit limit;  // the smallest of cgroup (v1, v2) and RLIMIT_AS
};

// `root` is a directory to read instead of / (tests).
MemoryLimit read_memory_limit(const std::string& root = "");
// Out-of-memory kills so far in this process's cgroup; without one, on this machine.
int64_t read_oom_kills(const std::string& root = "");
HostFacts survey_host(const std::string& root = "");

// GPUs that the kernel driver shows, /dev/nvidia[0-9]*: takes a few microseconds. The only test of whether
// there is a GPU.
int count_gpus(const std::string& root = "");
// "570.86.10"; "" without a driver.
std::string gpu_driver(const std::string& root = "");
// The next step for GpuSurvey::problem.
inline constexpr char kMendNvml[] =
    "reinstall the driver's libraries (after an update of the driver: reboot)";

// All cards that NVML lists, with names and memory (tens of milliseconds); if it lists none, as many as
// count_gpus() counts, with what /proc tells. NVML knows this machine only: another `root` is read without
// it.
GpuSurvey survey_gpus(const std::string& root = "");

}  // namespace lm
