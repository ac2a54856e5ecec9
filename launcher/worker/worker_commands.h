// Commands that need LibTorch, as the worker executes them. Each prints its result on stdout (one JSON object
// with --json) and returns the exit code; errors are thrown.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "launcher/command_line.h"

namespace lm {

Exit run_worker_command(const std::vector<std::string>& arguments);

Exit eval_command(const CommandLine& line);
Exit generate_command(const CommandLine& line);
Exit chat_command(const CommandLine& line);
Exit serve_command(const CommandLine& line);
Exit export_command(const CommandLine& line);
Exit merge_command(const CommandLine& line);
Exit verify_command(const CommandLine& line);
Exit diff_command(const CommandLine& line);

}  // namespace lm
