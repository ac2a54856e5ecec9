// The CLI process while its child works: counts stop signals and passes them on, ends the child at the
// second, and reports why it ended. It is single-threaded; its stop signals must be blocked
// (`block_stop_signals`) before the child is started, so that none is lost in between.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launcher/control.h"
#include "launcher/status.h"

namespace lm {

// Blocks SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGCHLD until they are waited for; SIGPIPE and SIGXFSZ become
// errors of the call.
void block_stop_signals();

// Whether one of the first four has arrived since the last call; does not wait.
bool stop_signal_came();

// Training: waits for the end of all `ranks`, relays stop requests through `control`, prints the first cause
// of a death on stderr. Returns the final status (state, exit code, reason, last record). Once one of several
// ranks has failed the others are notified, and killed if that does not end them. A killed rank that the
// kernel keeps (requests to a dead disk) is left behind.
struct WorkerCare {
  std::function<std::string()> less_memory = {};  // settings that save memory, for an OOM kill
  std::function<void()> left_behind = {};
  std::function<void()> rank_failed = {};          // notifies the others
  std::function<void()> meanwhile = {};            // about twice per second; must be quick
  std::function<std::string(int)> name = {};       // of a rank, in messages; default: "rank 0" and so on
  std::function<std::string(int)> operation = {};  // its last operation; "": unknown
  // In an MPI job: whether mpirun, or another launcher of this process, has ended.
  std::function<bool()> launcher_ended = {};
  // In an MPI job: how a rank of another CLI process has failed; this one's ranks must then end, too.
  std::function<std::optional<RunStatus>()> failed_elsewhere = {};
  bool quiet = false;  // another CLI process reports the run's end
};
RunStatus supervise_run(const std::vector<pid_t>& ranks, Control& control, const WorkerCare& care = {});

// The final status of a run whose CLI process was killed, from its rank's last record.
RunStatus status_of_killed(const Control& control);

// Other commands: passes signals on to the child, but for a terminal's Ctrl-C, which the child has itself;
// returns our exit code. If such a signal killed the child, this process ends by the same one. `compares`:
// the command is one that may end with Exit::kDiffer.
int supervise_command(pid_t child, bool compares = false);

}  // namespace lm
