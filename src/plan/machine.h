// What the plan knows of a machine, as a value: measured by the survey, or imagined on the command line.
// Sizes in bytes, rates per second; 0 means "not known", and the plan then takes the documented default.
// Capacities (memory, limits) may steer numerics; what happens to be free now and the rates never do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/processor.h"
#include "plan/gpu.h"
#include "schedule/timeline.h"

namespace lm {

// A directory of offload.paths.
struct Disk {
  std::string path;
  int64_t free_bytes = 0;
  double read_bandwidth = 0, write_bandwidth = 0;  // bytes/s, large requests past the page cache
  double both_bandwidth = 0;                       // as many reads as writes at once, both counted

  // What is left for each of so many that use it alike.
  void all_gather_among(int64_t users) {
    free_bytes /= users;
    for (double* const rate : {&read_bandwidth, &write_bandwidth, &both_bandwidth})
      *rate /= static_cast<double>(users);
  }
};

struct Machine {
  int cores = 1;  // that this process may use
  std::string cpu_model;
  Instructions instructions = Instructions::kNone;  // the widest that it has
  int64_t host_memory = 0;                          // physical
  int64_t host_available = 0;                       // MemAvailable, or less under a cgroup limit or RLIMIT_AS
  double gemm_bf16_flops = 0;                       // of all cores together
  double gemm_fp32_flops = 0;
  double gemm_sustained = 1;   // share of these that long work keeps up
  double fastest_flops = 0;    // of the quickest type
  std::string libraries = {};  // LibTorch's and its GPU libraries' versions; "" not known
  double memory_bandwidth = 0;
  double attention_flops = 0;    // of all cores together, in the model's type
  double gemm_call_seconds = 0;  // of the CPU's GEMMs, whatever their size
  double decode_bandwidth = 0;   // of the bytes that decoding a quantized weight makes
  std::vector<Gpu> gpus;
  std::vector<Disk> disks;
  int64_t host_limit = 0;  // the smallest of cgroup limit and RLIMIT_AS; 0: none
  // Resident memory of the CPU's executable with LibTorch started, before it has anything of a run.
  int64_t library_bytes = 0;
  double network_bandwidth = 0;  // to other machines, bytes/s each way, all its ranks together

  // The most host memory that this process can ever have; 0: not known.
  int64_t host_capacity() const;
};

// The ranks that share a run, and the machines that they are on, equally many on each.
struct World {
  int ranks = 1;
  int nodes = 1;
  bool by_machine = true;    // ranks are numbered machine by machine
  bool share_memory = true;  // those of a machine can have memory in common (comm/machine_memory.h)
  int ranks_per_node() const { return ranks / nodes; }
};

// What carries bytes from rank to rank, each way.
struct RankLinks {
  double inside = 0;           // a machine: bytes/s of each rank
  double between = 0;          // machines: bytes/s of all ranks of one
  double call_seconds = 0;     // until all have come to a call, whatever it moves
  double message_seconds = 0;  // more for each rank of another machine
  bool assumed = false;        // some rate is the documented default of cost_model.cpp
};

// What one of `ranks` equal processes on the machine may take of it.
Machine share_of_machine(const Machine& machine, int ranks);

// As text, and back; every number survives.
std::string machine_json(const Machine& machine);
Machine parse_machine(const std::string& text);
// What `lmlaunch doctor --json` has printed on a machine. Throws Error(11) where a key is missing or has no
// possible value.
Machine read_machine_file(const std::string& path);

// What computes, as far as it decides bits: "cpu avx512_bf16", "cuda NVIDIA H200".
std::string kernel_set(const Machine& machine, DeviceType device);

// Resident memory of lmlaunch-cpu | -cuda beside what is planned: libraries, thread stacks, GEMM workspaces.
int64_t host_library_bytes(const Machine& machine, DeviceType device);

// The rates of its links; documented defaults where nothing was measured.
LinkRates link_rates(const Machine& machine, DeviceType device);

}  // namespace lm
