// LM_CUDA(call): throws Error with the call, its CUDA name and text. For .cu files and cuda.cpp only.
#pragma once

#include "base/error.h"

namespace lm {

void check_cuda(const char* expression, int status, const char* file, int line);
#define LM_CUDA(call) ::lm::check_cuda(#call, static_cast<int>(call), __FILE__, __LINE__)

}  // namespace lm
