// The door while its child works: counts stop signals and passes them on, ends the child at the second, and
// says why it ended. The door is single-threaded; its stop signals must be blocked (`block_stop_signals`)
// before the child is started, so that none is lost in between.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launcher/control.h"
#include "launcher/status.h"

namespace lm {

// SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGCHLD wait to be taken; SIGPIPE and SIGXFSZ become errors of the
// call.
void block_stop_signals();

// Whether one of the first four has come since the last question; does not wait.
bool stop_signal_came();

// Training: waits for the end of all `ranks`, relays stop requests through `control`, prints the first cause
// of a death on stderr. The result is the final status (state, exit code, reason, last record). Once one of
// several has failed the others are told, and killed if that does not end them. A rank that is killed and
// that the kernel does not let go of (requests to a dead disk) is left behind.
struct RankCare {
  std::function<std::string()> less_memory = {};  // settings that take less; asked when the kernel has killed
  std::function<void()> left_behind = {};
  std::function<void()> rank_failed = {};          // tells the others
  std::function<void()> meanwhile = {};            // about twice per second; must be quick
  std::function<std::string(int)> name = {};       // of a rank, in messages; "rank 0" and so on
  std::function<std::string(int)> operation = {};  // what it was last at; "" unknown
  // Of an MPI job: whether mpirun, or who else has started this process, has ended.
  std::function<bool()> launcher_ended = {};
  // Of an MPI job: how a rank under another door has failed; then this one's ranks have to end, too.
  std::function<std::optional<RunStatus>()> failed_elsewhere = {};
  bool quiet = false;  // another door speaks for the run
};
RunStatus supervise_run(const std::vector<pid_t>& ranks, Control& control, const RankCare& care = {});

// The final status of a run whose door was killed, by its rank's last record.
RunStatus status_of_killed(const Control& control);

// Other commands: signals go to the child as they come; the result is our exit code. When the child died of a
// signal that we passed on, this process ends by the same one.
int supervise_command(pid_t child);

}  // namespace lm
