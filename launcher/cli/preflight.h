// File operations of a run, tried before anything large is loaded: a later refusal would cost hours.
#pragma once

#include <string>

namespace lm {

// Creates, writes, syncs, renames and removes a file in the run's directory. Throws Error(12) with the
// refused call.
void try_run_directory(const std::string& directory);

// Raises this process's limit of open files as far as allowed; throws Error(12) if a run needs more.
void raise_descriptor_limit();

}  // namespace lm
