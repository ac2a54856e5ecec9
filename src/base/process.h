// Another program as a child process: an explicit argv and environment, no shell, killed with its parent
// unless configured to stay. Called by one thread, whose end also ends the child.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lm {

// INT, TERM, HUP and USR1 in the child. kDefault and kIgnored also unblock every signal.
enum class StopSignals : uint8_t { kAsHere, kDefault, kIgnored };

struct Program {
  std::vector<std::string> argv;              // the first: a path, or a name that PATH is searched for
  std::vector<std::string> environment = {};  // "NAME=value"; empty: this process's
  std::vector<std::string> variables = {};    // in addition to these
  std::vector<int> keep_fds = {};             // stay open across exec, under the same number
  StopSignals stop_signals = StopSignals::kAsHere;
  bool own_session = false;  // leads a session and outlives this process: it must end by itself
  bool own_group = false;    // leads a process group, which a terminal's Ctrl-C does not reach
};

// Its standard streams; -1: this process's.
struct Streams {
  int in = -1, out = -1, err = -1;
};

// Returns the pid, or -errno if it cannot be run. The caller reaps.
pid_t start_program(const Program& program, const Streams& streams = {});

struct ProgramResult {
  int error = 0;         // errno when it could not be run
  bool stopped = false;  // `stopped` returned true, and it was killed
  int status = -1;       // as waitpid reports it; -1 when it was killed here
  // Standard output, at most 32 MiB; more, or an unended line of that size on standard error, ends it.
  std::string output;
};

// Runs it to its end with `input` as its standard input. Passes lines of its standard error to
// `on_error_line` and polls `stopped` about ten times per second; both may be empty. On any exception the
// child is killed.
ProgramResult run_program(const Program& program, const std::string& input,
                          const std::function<void(const std::string&)>& on_error_line,
                          const std::function<bool()>& stopped);

// The path of "lmlaunch-cpu" or another executable beside this one; "" if it does not exist.
std::string beside_this_program(const std::string& name);

}  // namespace lm
