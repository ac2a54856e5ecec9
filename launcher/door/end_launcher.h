// mpirun that waits for a machine which it does not reach any more: when a run of several machines has
// failed, its end is the launcher's end, too.
#pragma once

namespace lm {

// Leaves a process behind that ends mpirun, where that has started this one and is still there some seconds
// after it has seen this process's end. Nothing where something else has started it. Single-threaded callers
// only: it forks.
void end_mpirun_later();

}  // namespace lm
