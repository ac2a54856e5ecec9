// Commands that the CLI executes itself, without torch. Each prints its result on stdout (one JSON object
// with --json) and returns the exit code; errors are thrown.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "launcher/command_line.h"
#include "launcher/presets.h"
#include "plan/alternatives.h"

namespace lm {

Exit doctor_command(const CommandLine& line);
Exit presets_command(const CommandLine& line);
Exit report_command(const CommandLine& line);
Exit completions_command(const CommandLine& line);
// Also `lmlaunch --help` and `lmlaunch COMMAND --help`.
Exit help_command(const CommandLine& line);
// Also `lmlaunch --dry-run CONFIG`.
Exit plan_command(const CommandLine& line);

// Writes a configuration for a model and data, on this machine.
Exit init_command(const CommandLine& line);

// `init --from FILE`: translates another trainer's configuration. `init --words`: prints the page of all
// their keys.
Exit init_from_command(const CommandLine& line);

// The ways to train that configuration, which is to become a file, on this machine: as `plan --compare` lists
// them.
std::vector<Alternative> ways_to_train(const Config& config, const std::string& config_path,
                                       const CommandLine& line);

// Settings that lower the host memory of this command line's run, those that save most first; "": none known.
std::string less_host_memory(const CommandLine& line);

}  // namespace lm
