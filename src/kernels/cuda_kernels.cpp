// kernels() for executables with CUDA code.
#include "kernels/cpu_features.h"
#include "kernels/cuda_launchers.h"

namespace lm {
namespace {

constexpr Kernels kCudaKernels = {
    .rms_norm_forward = gpu::rms_norm_forward,
    .rms_norm_backward = gpu::rms_norm_backward,
    .rope = gpu::rope,
    .swiglu_forward = gpu::swiglu_forward,
    .swiglu_backward = gpu::swiglu_backward,
    .softmax_statistics = gpu::softmax_statistics,
    .softmax_gradient = gpu::softmax_gradient,
    .softmax_loss = gpu::softmax_loss,
    .gather_rows = gpu::gather_rows,
    .scatter_rows = gpu::scatter_rows,
    .sum_rows = gpu::sum_rows,
    .add_rows = gpu::add_rows,
    .accumulate = gpu::accumulate,
    .sum_columns = gpu::sum_columns,
    .add_bias = gpu::add_bias,
    .dropout = gpu::dropout,
    .granule_norms = gpu::granule_norms,
    .normalise = gpu::normalise,
    .update = gpu::update,
    .materialise = gpu::materialise,
    .chunk_sums = gpu::chunk_sums,
};

}  // namespace

const Kernels& kernels(DeviceType device) {
  return device == DeviceType::kCuda ? kCudaKernels : cpu_kernels(cpu_level());
}

}  // namespace lm
