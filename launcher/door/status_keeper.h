// Who writes how a run has ended when its door cannot, because somebody has killed it (kill -9, mpirun a
// second after its own SIGTERM): a process beside the door, in a session of its own, that sleeps until the
// door has ended. Then it waits until the run's processes are gone and, where nobody else has taken the
// directory and its status is not a final one, writes the one that the rank's last record has. Whoever kills
// it, too, leaves a status of which `updated_at`, `host` and `pid` tell that it is stale.
#pragma once

#include <sys/types.h>

#include "launcher/control.h"
#include "launcher/door/checked_run.h"

namespace lm {

class StatusKeeper {
 public:
  // By the door, which is single-threaded and has the run's lock, once the ranks are its children.
  StatusKeeper(const CheckedRun& run, const Control& control);
  ~StatusKeeper();  // the door has written the status itself: nothing is left of the process
  StatusKeeper(const StatusKeeper&) = delete;
  StatusKeeper& operator=(const StatusKeeper&) = delete;

 private:
  pid_t process_ = -1;
};

}  // namespace lm
