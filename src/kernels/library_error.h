// Translates LibTorch's exceptions to Error, so that a worker prints that instead of a C++ backtrace. Any
// thread.
#pragma once

#include <exception>

#include "base/error.h"

namespace lm {

// Error(30) if GPU memory ran out, with the requested and the free bytes; Error(31) if host memory did;
// otherwise a bug of ours, Error(70).
Error library_error(const std::exception& error);

}  // namespace lm
