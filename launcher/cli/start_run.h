// From a parsed command line to a finished child: the CLI's part of `train` and of the commands that need
// torch. One thread; call once.
#pragma once

#include "base/error.h"
#include "launcher/command_line.h"

namespace lm {

// Checks everything that can be checked without torch, locks the run's directory, starts the ranks and
// supervises them until they have ended. Writes <run>/status.json and the last line on stderr. Returns the
// process's exit code.
int train_in_worker(const CommandLine& line);

// export, generate, eval, verify.
int command_in_worker(const CommandLine& line);

}  // namespace lm
