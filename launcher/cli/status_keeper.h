// Writes a run's final status if its CLI process cannot, because it was killed (kill -9, or mpirun a second
// after its own SIGTERM): a process beside it, in its own session, that sleeps until the CLI process has
// ended. Then it waits until the run's processes are gone and, if no other run has taken the directory and
// its status is not a final one, writes the status of the rank's last record. If it is killed, too,
// `updated_at`, `host` and `pid` of the status show that it is stale.
#pragma once

#include <sys/types.h>

#include "launcher/cli/checked_run.h"
#include "launcher/control.h"

namespace lm {

class StatusKeeper {
 public:
  // Created by the CLI process, which is single-threaded and holds the run's lock, before it starts the
  // ranks: a kill right after that leaves a final status, too.
  StatusKeeper(const CheckedRun& run, const Control& control);
  ~StatusKeeper();  // the CLI process has written the status: ends the keeper
  StatusKeeper(const StatusKeeper&) = delete;
  StatusKeeper& operator=(const StatusKeeper&) = delete;

 private:
  pid_t process_ = -1;
};

}  // namespace lm
