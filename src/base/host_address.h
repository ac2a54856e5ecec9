// Whether a GPU's kernels reach registered host memory by the host's own address. cuda.cpp | no_cuda.cpp.
#pragma once

namespace lm {

// On the selected device; not on some systems, where copies alone reach it. (WSL2 is suspected; not tried.)
bool cuda_uses_host_addresses();

}  // namespace lm
