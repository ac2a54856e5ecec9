// Setup of LibTorch for one rank: threads, determinism and the current stream, set once before the first
// tensor. runtime_cpu.cpp | runtime_cuda.cpp, chosen by the executable.
#pragma once

#include <cstdint>
#include <string>

#include "base/cuda.h"

namespace lm {

// Sets ATen's threads, turns autograd off for this thread, selects deterministic kernels if requested
// (without their NaN-filling of empty tensors), and returns the stream on which ATen and our kernels enqueue.
// Call once per process, on the compute thread. `gemm_shapes`: limit of shapes for which the CPU's GEMM
// library caches code; 0: no limit.
StreamView start_torch(DeviceType device, int threads, bool deterministic, int64_t gemm_shapes = 0);

// Whether products of fp32 matrices on the GPU may round their factors to TF32: LibTorch's, and so all of
// ours. Off after start_torch. No effect on the CPU.
void allow_tf32(bool allowed);

// The libraries that compute for the device besides our kernels, with their loaded versions: "LibTorch
// 2.11.0+cu130, cuBLASLt 13.1.0, cuDNN 9.19.0". Other versions may round differently. Does not need
// start_torch.
std::string library_versions(DeviceType device);

// Limits the GPU memory that LibTorch may allocate from now on: beyond it LibTorch frees its cached memory,
// then throws its out-of-memory error.
void cap_library_memory(int64_t bytes);
// Device memory reserved by LibTorch's allocator, used or not; 0 on the CPU.
int64_t library_device_bytes();

}  // namespace lm
