// LibTorch's exceptions in our words: what the rank's main prints instead of a C++ backtrace. Any thread.
#pragma once

#include "base/error.h"

namespace c10 {
class Error;
}

namespace lm {

// Error(30) where the GPU's memory ran out, with the bytes asked and free; else a bug of ours, Error(70).
Error library_error(const c10::Error& error);

}  // namespace lm
