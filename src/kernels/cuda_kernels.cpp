// kernels() for executables with CUDA code.
#include "kernels/cpu_features.h"
#include "kernels/cuda_launchers.h"

namespace lm {
namespace {

constexpr Kernels kCudaKernels = {
#define LM_KERNEL(name, Args) .name = gpu::name,
#define LM_GPU_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
    .chunk_sums = gpu::chunk_sums,
};

}  // namespace

const Kernels& kernels(DeviceType device) {
  return device == DeviceType::kCuda ? kCudaKernels : cpu_kernels(cpu_level());
}

}  // namespace lm
