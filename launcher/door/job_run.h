// Training in an MPI job: what the door of each of its processes does. It keeps one rank as its child, so
// that a rank that is killed has a witness that names the cause, stop signals are counted, and a rank that is
// stopped can be killed; mpirun and srun see the door alone. The door of rank 0 holds the run's directory,
// speaks on the console and writes the run's status; the others are silent unless they are the witness.
#pragma once

#include "launcher/command_line.h"
#include "launcher/environment.h"

namespace lm {

// Stop signals must be blocked. Returns the process's exit code: the same for all processes of the job.
int train_in_job(const CommandLine& line, const LauncherJob& job);

}  // namespace lm
