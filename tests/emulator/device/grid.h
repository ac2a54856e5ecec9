// What the files of the kernels' stand-in share. One grid runs at a time (launch.cpp sees to it), in the
// thread of its stream.
#pragma once

#include <functional>
#include <string>

#include "cuda_runtime.h"
#include "simt.h"

namespace emulator::simt {

// Runs every thread of the grid, then returns; throws std::runtime_error where a kernel breaks the rules.
void run_grid(const char* kernel, dim3 grid, dim3 block, const std::function<void()>& thread);
// From inside a kernel: gives the grid up, naming the thread.
[[noreturn]] void stop(const std::string& what);

// Lives while a grid runs: looks at the accesses of the thread that made it, and tells the order checker of
// them at its end.
class Accesses {
 public:
  Accesses();
  ~Accesses();
  Accesses(Accesses&&) = delete;
};

}  // namespace emulator::simt
