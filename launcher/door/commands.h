// The commands that the door carries out itself, without torch. Each prints its result on stdout (one JSON
// object with --json) and returns the exit code; errors are thrown.
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

// `init --from FILE`: the configuration of another trainer as one of ours. `init --words`: the page of all
// words.
Exit init_from_command(const CommandLine& line);

// What this machine could do with that configuration, which is to become a file: as `plan --compare` lists
// it.
std::vector<Alternative> ways_to_train(const Config& config, const std::string& config_path,
                                       const CommandLine& line);

// Settings with which a run of this command line takes less host memory, those that save most first; "" where
// none are known.
std::string less_host_memory(const CommandLine& line);

}  // namespace lm
