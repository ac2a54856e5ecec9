// A run as far as it can be checked without torch, before anything is created; and the directory that it
// takes.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/process.h"
#include "config/config.h"
#include "launcher/command_line.h"
#include "launcher/door/run_directory.h"
#include "launcher/report/report.h"
#include "spec/name_map.h"

namespace lm {

struct CheckedRun {
  Config config;
  NameMap names = {};
  std::string program = {};    // the rank's executable
  std::string directory = {};  // nothing is there yet, or what this run may go on from
  std::vector<std::string> overridden = {};
};

// Throws Error for whatever would stop the run before it begins.
CheckedRun check_run(const CommandLine& line);

// The same by a process of an MPI job that another one leads: it looks after directory and disks.
CheckedRun check_run_of_leader(const CommandLine& line);

// Creates the directory where there is none, and takes it; throws Error(12, 13, 14).
RunLock take_directory(const CheckedRun& run);

// The executable for the device that the command line, the configuration and the machine decide; a note says
// why it is another one than one might expect, unless `quiet`.
std::string rank_program(const CommandLine& line, DeviceChoice configured, bool quiet = false);

// GPUs that CUDA shows to a run here.
int visible_gpu_count();

// Whether that executable computes on a GPU.
bool computes_on_gpu(const std::string& program);

// The rank's executable, dying with this process, in an environment without what changes results; what
// `variables` name has the values that they give.
pid_t start_rank(const std::string& executable, const CommandLine& line, const std::vector<int>& keep_fds,
                 StopSignals stop_signals, const std::vector<std::string>& variables = {});

// How a run has ended, in its directory, with its page and its model's card; one that could not be recorded
// is still a finished run.
void record_end(const CheckedRun& run, const RunStatus& status, LiveReport& report);

}  // namespace lm
