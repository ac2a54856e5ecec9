// A training run.
#pragma once

#include "base/error.h"
#include "launcher/command_line.h"

namespace lm {

// `train CONFIG --run-dir DIR --control-fd FD ...`, as the CLI passes it. Returns kDone or kStopped, or the
// code of an error that it has printed.
Exit run_training(const CommandLine& line);

}  // namespace lm
