// LibTorch's exceptions in our words: what the rank's main prints instead of a C++ backtrace. Any thread.
#pragma once

#include <exception>

#include "base/error.h"

namespace lm {

// Error(30) where the GPU's memory ran out, with the bytes asked and free; Error(31) where the host's did;
// else a bug of ours, Error(70).
Error library_error(const std::exception& error);

}  // namespace lm
