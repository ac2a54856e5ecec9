// What a GPU does with host memory beyond copies: whether its kernels reach registered memory by the host's
// own address, and registration of memory that this process may only read. cuda.cpp | no_cuda.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

// On the selected device; not on some systems, where copies alone reach it. (WSL2 is suspected; not tried.)
bool cuda_uses_host_addresses();

// As cuda_register_host (base/cuda.h), for a mapping that this process may read and not write: the GPU may
// not write to it either. Only where the selected device does that; elsewhere such a mapping is refused.
bool cuda_registers_read_only();
bool cuda_register_read_only(void* memory, int64_t bytes, std::string* reason);

}  // namespace lm
