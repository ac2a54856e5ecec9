// The machine that `lmlaunch plan` is for: this one, or that of --machine FILE, with what the command line
// changes of it; and how many ranks are on how many of them.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "launcher/command_line.h"
#include "launcher/machine/machine_survey.h"
#include "plan/machine.h"

namespace lm {

struct PlannedMachine {
  Machine machine;
  World world;
  std::string file;       // of --machine; "": this machine
  std::string described;  // what it has: "2 cores, 23.5 GiB, 8 x H200"; an imagined GPU is not in it
  bool imagined = false;  // not this machine as it is, and no run of its own
};

// Whether the GPUs of the plan need not be here.
bool imagines_gpus(const CommandLine& line);

// Without disks, if it is this machine. Throws Error(2) for ranks that fill no machines.
PlannedMachine planned_machine(const CommandLine& line, const SurveyedGpus& found);

// Of the file's disks those that the paths of offload.paths stand for: by their names, and the others in the
// file's order. Throws Error(2) where the file has fewer.
std::vector<Disk> disks_of_file(const PlannedMachine& planned, const Config& config);

// What a plan for this machine takes for granted of it, a sentence each.
std::vector<std::string> machine_assumptions(const PlannedMachine& planned);

}  // namespace lm
