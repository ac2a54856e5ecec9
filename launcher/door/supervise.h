// The door while its child works: counts stop signals and passes them on, ends the child at the second, and
// says why it ended. The door is single-threaded; its stop signals must be blocked (`block_stop_signals`)
// before the child is started, so that none is lost in between.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "launcher/control.h"
#include "launcher/status.h"

namespace lm {

// SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGCHLD wait to be taken; SIGPIPE and SIGXFSZ become errors of the
// call.
void block_stop_signals();

// Training: waits for the end of `child`, relays stop requests through `control`, prints the first cause of a
// death on stderr. The result is the final status (state, exit code, reason, last record). A child that is
// killed and that the kernel does not let go of (requests to a dead disk) is left behind.
struct RankCare {
  std::function<std::string()> less_memory = {};  // settings that take less; asked when the kernel has killed
  std::function<void()> left_behind = {};
};
RunStatus supervise_run(pid_t child, Control& control, const RankCare& care = {});

// Other commands: signals go to the child as they come; the result is our exit code. When the child died of a
// signal that we passed on, this process ends by the same one.
int supervise_command(pid_t child);

}  // namespace lm
