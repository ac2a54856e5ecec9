// LibTorch as one rank uses it: threads, determinism and the current stream, set once before the first
// tensor. runtime_cpu.cpp | runtime_cuda.cpp, chosen by the executable.
#pragma once

#include <cstdint>
#include <string>

#include "base/cuda.h"

namespace lm {

// Sets ATen's threads, turns autograd's bookkeeping off for this thread, asks for deterministic kernels where
// wanted (without their NaN-filling of empty tensors), and returns the stream on which ATen and our kernels
// enqueue. Call once per process, on the compute thread. `gemm_shapes`: for how many the CPU's GEMM library
// may keep code; 0: as many as it likes.
StreamView start_torch(DeviceType device, int threads, bool deterministic, int64_t gemm_shapes = 0);

// Which libraries compute for the device beside our kernels, with the versions that are loaded:
// "LibTorch 2.11.0+cu130, cuBLAS 13.1.0, cuDNN 9.19.0". Other versions may round otherwise. Needs no started
// LibTorch.
std::string library_versions(DeviceType device);

// The most of the GPU's memory that LibTorch may take for itself from now on: what is more ends as its
// out-of-memory error, after it has given back what it keeps for later.
void cap_library_memory(int64_t bytes);
// Device memory that LibTorch's allocator holds, used or not; 0 on the CPU.
int64_t library_device_bytes();

}  // namespace lm
