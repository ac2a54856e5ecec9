// A run as far as it can be checked without torch, before anything is created; and the lock of its directory.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/process.h"
#include "config/config.h"
#include "launcher/cli/run_directory.h"
#include "launcher/command_line.h"
#include "launcher/report/report.h"
#include "spec/model_spec.h"

namespace lm {

struct CheckedRun {
  Config config;
  ModelSpec model = {};
  std::string program = {};    // the worker's executable
  std::string directory = {};  // may not exist yet, or holds what this run may resume from
  std::vector<std::string> overridden = {};
};

// Throws Error for whatever would stop the run before it begins.
CheckedRun check_run(const CommandLine& line);

// The same for a process of an MPI job other than rank 0's, which checks directory and disks.
CheckedRun check_run_of_leader(const CommandLine& line);

// Creates the directory if it does not exist, and locks it; throws Error(12, 13, 14).
RunLock take_directory(const CheckedRun& run);

// The worker's executable for the device that the command line, the configuration and the machine decide; a
// note explains an unexpected choice, unless `quiet`.
std::string worker_program(const CommandLine& line, DeviceChoice configured, bool quiet = false);

// Number of GPUs that CUDA shows to a run here.
int visible_gpu_count();

// Those GPUs in CUDA's order, each as CUDA_VISIBLE_DEVICES names it: the UUID, by which a GPU that is gone
// can be told from the others; if NVML does not tell it the number.
std::vector<std::string> visible_gpu_names();

// Whether that executable computes on a GPU.
bool computes_on_gpu(const std::string& program);

// Starts the worker, which dies with this process, in an environment without variables that change results;
// `variables` ("NAME=value") replace the environment's own.
pid_t start_worker(const std::string& executable, const CommandLine& line, const std::vector<int>& keep_fds,
                   StopSignals stop_signals, const std::vector<std::string>& variables = {});

// Records how a run has ended: its status, page and model card. A failure is only printed: a run that cannot
// be recorded is still finished.
void record_end(const CheckedRun& run, const RunStatus& status, LiveReport& report);

}  // namespace lm
