// The rank's executable as a child process: started with an explicit argv and environment (no shell), dying
// with its parent, its end reported with the first cause. One thread.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace lm {

struct ChildCommand {
  std::string executable;
  std::vector<std::string> arguments;  // without argv[0]
  std::vector<int> keep_fds;           // stay open across exec, under the same number
  bool ignores_stop_signals = false;   // training: the door counts INT, TERM, HUP and USR1, not the rank
};

// Forks and executes; throws Error(12) when the executable cannot be run. The caller reaps.
pid_t start_child(const ChildCommand& command);

// "lmlaunch-cpu" or "lmlaunch-cuda" beside this program; "" when it is not there.
std::string beside_this_program(const std::string& name);

}  // namespace lm
