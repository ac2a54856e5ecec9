// Names of kernels, for messages and counters.
#pragma once

#include <string>

namespace emulator::simt {

// "rope.cu rotate<Bf16, 8, false>", from the symbol table of the program; its address where there is none.
// Any thread.
std::string kernel_name(const void* kernel);

}  // namespace emulator::simt
