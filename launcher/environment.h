// The process's environment, which only this file reads: where Python, the hub cache and our own cache are,
// and which GPUs CUDA shows. Values of one moment; any thread may call before threads change the environment.
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

// The command that repairs a missing part: "./dev build", or pip's command if `program` (the path of
// lmlaunch) lies in a wheel that pip has installed: site-packages/lmlaunch/bin/lmlaunch.
std::string how_to_mend(const std::string& program);
std::string how_to_mend();  // of this program

// Access to the hub: HF_ENDPOINT, HF_HUB_OFFLINE, and HF_TOKEN or else the token that `hf auth login` has
// stored. Only `lmlaunch fetch` and its offer read it (cli/fetch.h).
struct HubAccess {
  std::string endpoint;
  bool offline = false;
  std::string token = {};       // "": none
  std::string token_from = {};  // "HF_TOKEN", or the file
};

HubAccess read_hub_access();

// CUDA_* variables for a worker process.
struct CudaVariables {
  std::optional<std::string> visible_devices;  // CUDA_VISIBLE_DEVICES
  // CUDA_DEVICE_ORDER. Ours is PCI_BUS_ID: then CUDA, NVML and nvidia-smi use the same numbers, so that
  // CUDA_VISIBLE_DEVICES takes those that nvidia-smi shows. CUDA's own default, FASTEST_FIRST, is kept if the
  // user sets it.
  std::string device_order = "PCI_BUS_ID";
};

CudaVariables read_cuda_variables();

// SLURM_JOB_END_TIME: when the scheduler ends this job, in seconds since 1970; empty outside of a Slurm job.
std::optional<int64_t> job_end_time();

// What mpirun, or srun with PMIx, tells the process that it has started. Any other process is rank 0 of 1.
struct LauncherJob {
  int rank = 0, ranks = 1;
  std::string launcher = {};  // "mpirun", "srun"; "" none
  std::string id = {};        // the same for all processes of the job, and for no other job
  bool one_machine = false;   // all processes are on one machine, as far as the launcher tells
  int machines = 1;           // with equally many processes each, as far as the launcher tells
  int local_rank = 0;         // among the processes of its machine
  // Numeric addresses of the machine that the launcher runs on, which all others of the job have a route to.
  std::vector<std::string> launcher_addresses = {};
  std::string problem = {};  // why several processes cannot find each other; "": none
  bool shared() const { return ranks > 1; }
};

LauncherJob read_launcher_job();

// LM_CPU, for tests: neither the program nor its libraries use wider instructions than these
// (base/processor.h). Call before anything asks for instructions. Throws Error(10) for an unknown name.
void limit_processor();

// LMLAUNCH_SILENCE, for tests: seconds without a heartbeat after which a rank that others wait for is
// given up; nothing where it is not set.
std::optional<double> silence_seconds();

// LMLAUNCH_FOLLOW, for tests: seconds that the end of a run waits for its trackers (cli/follower.h); empty
// if not set.
std::optional<double> follow_seconds();

// Whether a program of this name or path exists and may be executed here, searched for as execvp does.
bool can_execute(const std::string& program);

// Settings of Open MPI for a job on one machine, beside the user's: messages pass through shared memory, so
// that its ranks listen on no network.
std::vector<std::string> one_machine_mpi();

// Variables for a rank with a GPU: of the GPUs that CUDA shows here, the rank sees the `place`-th in CUDA's
// order. NCCL uses the named interface ("lo": it listens on no network; "": it chooses), and its monitor,
// which would listen too, is off. The user's own settings of both are kept.
std::vector<std::string> gpu_of_rank(int place, const std::string& interface);
// The same for the GPU that CUDA_VISIBLE_DEVICES names so: a number or a UUID.
std::vector<std::string> gpu_of_rank(const std::string& gpu, const std::string& interface);

// The environment of a rank as "NAME=value" strings. Variables that could change the bits of a result are
// removed (ATEN_*, MKL_*, DNNL_*, ONEDNN_*, OMP_*, TORCH_*, PYTORCH_*, CUBLAS*); cuBLAS's workspace, the GEMM
// library's code cache, the spinning of waiting threads and CUDA's numbering of GPUs are fixed.
std::vector<std::string> worker_environment();

}  // namespace lm
