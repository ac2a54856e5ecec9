// Who writes how a run has ended when its door cannot, because somebody has killed it (kill -9, mpirun a second
// after its own SIGTERM): a process beside the door, in a session of its own, that sleeps until the door has
// ended. If the run's status is a final one by then it leaves. Else it waits until the run's processes are gone
// and nobody else has taken the directory, and writes the status that the rank's last record has. Whoever kills
// it, too, leaves a status of which `updated_at`, `host` and `pid` tell that it is stale.
#pragma once

#include "launcher/control.h"
#include "launcher/door/checked_run.h"

namespace lm {

// By the door, which is single-threaded, once it has the run's lock and before it starts ranks.
void keep_status(const CheckedRun& run, const Control& control);

}  // namespace lm
