// What a run will do to its files, tried before anything large is loaded: a refusal then costs hours.
#pragma once

#include <string>

namespace lm {

// Creates, writes, syncs, renames and removes a file in the run's directory. Throws Error(12) naming the call
// that is refused.
void try_run_directory(const std::string& directory);

// Lets this process and its children have as many descriptors as they may; throws Error(12) where a run would
// not get through with these.
void raise_descriptor_limit();

}  // namespace lm
