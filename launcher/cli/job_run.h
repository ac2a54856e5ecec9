// Training in an MPI job: the CLI process of each rank. It keeps the rank as its child, so that the cause of
// a rank's death is known, stop signals are counted, and a stopped rank can be killed; mpirun and srun see
// only the CLI process. Rank 0's CLI process locks the run's directory, prints on the console and writes the
// run's status; the others print only the death of their own rank.
#pragma once

#include "launcher/command_line.h"
#include "launcher/environment.h"

namespace lm {

// Stop signals must be blocked. Returns the process's exit code: the same for all processes of the job.
int train_in_job(const CommandLine& line, const LauncherJob& job);

}  // namespace lm
