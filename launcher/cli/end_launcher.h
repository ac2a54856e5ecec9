// Ends an mpirun that waits for an unreachable machine: when a run on several machines has failed, its
// launcher must end, too.
#pragma once

namespace lm {

// Leaves a process behind that ends mpirun, if it has started this process and is still there some seconds
// after this process's end. Does nothing under another launcher. Single-threaded callers only: it forks.
void end_mpirun_later();

}  // namespace lm
