// Runs one program to its end: no shell, its own standard input, output collected, errors relayed line by
// line. The child is killed when this process dies, and on any exception here. Called by one thread; blocks.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lm {

struct ChildResult {
  int status = 0;      // as waitpid reports it
  std::string output;  // standard output, at most 32 MiB
};

// `stopped` is asked about ten times per second; when it says yes the child is killed and Error(75) thrown.
// Throws Error(10) when the program cannot be started.
ChildResult run_child(const std::vector<std::string>& arguments, const std::string& input,
                      const std::function<void(const std::string&)>& on_error_line,
                      const std::function<bool()>& stopped);

}  // namespace lm
