// The commands that the door carries out itself, without torch. Each prints its result on stdout (one JSON
// object with --json) and returns the exit code; errors are thrown.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "launcher/command_line.h"

namespace lm {

Exit doctor_command(const CommandLine& line);
Exit presets_command(const CommandLine& line);
// Also `lmlaunch --dry-run CONFIG`.
Exit plan_command(const CommandLine& line);

// Settings with which a run of this command line takes less host memory, those that save most first; "" where
// none are known.
std::string less_host_memory(const CommandLine& line);

// The files of configs/, compiled in, sorted by name.
struct Preset {
  std::string name;  // without .toml
  std::string text;
};
const std::vector<Preset>& presets();

}  // namespace lm
