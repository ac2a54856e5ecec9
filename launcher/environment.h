// The process's environment, read here alone: where Python, the hub cache and our own cache are, and which
// GPUs CUDA is told to show. Values of one moment; any thread may call before threads change the environment.
// No other variable changes behaviour.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lm {

struct Environment {
  std::string python;       // interpreter for data preparation; "" when none was found
  std::string python_from;  // "LMLAUNCH_PYTHON", "the build" or "PATH"
  // Nearest first: directories that hold models--ORG--NAME and datasets--ORG--NAME.
  std::vector<std::string> hub_caches;
  std::vector<std::string> datasets_caches;  // of the datasets library: directories that hold ORG___NAME
  std::string home;                          // HOME; "" without one
  std::string cache_dir;  // ours: $XDG_CACHE_HOME/lmlaunch or ~/.cache/lmlaunch; "" without a home
  std::string token_cache() const { return cache_dir.empty() ? "" : cache_dir + "/tokens"; }
};

Environment read_environment();

// How a part that is missing comes back: "./dev build", or pip's command where `program` (the path of
// lmlaunch) lies in a wheel that pip has installed: site-packages/lmlaunch/bin/lmlaunch.
std::string how_to_mend(const std::string& program);
std::string how_to_mend();  // of this program

// How the hub is reached: HF_ENDPOINT, HF_HUB_OFFLINE, and HF_TOKEN or else what `hf auth login` has stored.
// Only `lmlaunch fetch` and its offer read it (door/fetch.h).
struct HubAccess {
  std::string endpoint;
  bool offline = false;
  std::string token = {};       // "": none
  std::string token_from = {};  // "HF_TOKEN", or the file
};

HubAccess read_hub_access();

// What a rank's CUDA is told about GPUs.
struct CudaVariables {
  std::optional<std::string> visible_devices;  // CUDA_VISIBLE_DEVICES
  // CUDA_DEVICE_ORDER. Ours is PCI_BUS_ID: then CUDA, NVML and nvidia-smi number alike, so that the numbers
  // in CUDA_VISIBLE_DEVICES are those that nvidia-smi shows. CUDA's own default, FASTEST_FIRST, is kept when
  // the user says so.
  std::string device_order = "PCI_BUS_ID";
};

CudaVariables read_cuda_variables();

// SLURM_JOB_END_TIME: when the scheduler ends this job, in seconds since 1970; nothing outside of a Slurm
// job.
std::optional<int64_t> job_end_time();

// What mpirun, or srun with PMIx, says of the process that it has started. A process that nobody, or a
// launcher of one, has started is rank 0 of 1.
struct LauncherJob {
  int rank = 0, ranks = 1;
  std::string launcher = {};  // "mpirun", "srun"; "" none
  std::string id = {};        // one for all processes of the job and for no other job
  bool one_machine = false;   // that all processes are on, as far as the launcher says
  int machines = 1;           // with equally many processes each, likewise
  int local_rank = 0;         // among the processes of its machine
  // Numeric ones of the machine that the launcher itself is on, which all others of the job have a route to.
  std::vector<std::string> launcher_addresses = {};
  std::string problem = {};  // why several processes cannot find each other; "" none
  bool shared() const { return ranks > 1; }
};

LauncherJob read_launcher_job();

// LM_CPU, for tests: the program uses no wider instructions than these (base/processor.h), and its libraries
// neither. Throws Error(10) for another name. Before anything has asked for instructions.
void limit_processor();

// LMLAUNCH_SILENCE, for tests: seconds without a heartbeat after which a rank that others wait for is
// given up; nothing where it is not set.
std::optional<double> silence_seconds();

// LMLAUNCH_FOLLOW, for tests: seconds that the end of a run waits for its trackers (door/follower.h); nothing
// where it is not set.
std::optional<double> follow_seconds();

// What Open MPI of a job on one machine is told, beside what the user has told it: messages pass through
// shared memory, so that its ranks listen on no network.
std::vector<std::string> one_machine_mpi();

// What a rank with a GPU is told beside its environment: CUDA shows it one of the GPUs that it shows here,
// the `place`-th in CUDA's order. NCCL speaks by the interface that is named ("lo": nothing listens on a
// network;
// "": it chooses), and its monitor, which would listen beside it, is off. What the user says of either
// stands.
std::vector<std::string> gpu_of_rank(int place, const std::string& interface);

// The environment of a rank as "NAME=value" strings: without what changes the bits of a result behind our
// back (ATEN_*, MKL_*, DNNL_*, ONEDNN_*, OMP_*, TORCH_*, PYTORCH_*, CUBLAS*), with cuBLAS's workspace, the
// GEMM library's code cache and the spinning of waiting threads fixed, and with CUDA's numbering of GPUs.
std::vector<std::string> rank_environment();

}  // namespace lm
