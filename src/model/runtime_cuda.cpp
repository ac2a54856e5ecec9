#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include "base/check_cuda.h"
#include "model/runtime.h"

namespace lm {

StreamView start_torch(DeviceType device, int threads, bool deterministic) {
  static const c10::InferenceMode no_autograd(true);
  at::set_num_threads(threads);
  at::globalContext().setDeterministicAlgorithms(deterministic, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  if (device == DeviceType::kCpu) return {DeviceType::kCpu, nullptr, threads};
  at::globalContext().lazyInitDevice(
      at::kCUDA);  // what a program without torch's Python must do: the allocator
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(true);
  c10::cuda::setCurrentCUDAStream(stream);
  return {DeviceType::kCuda, stream.stream(), threads};
}

int64_t library_device_bytes() {
  int device = 0;
  if (!c10::cuda::CUDACachingAllocator::get()->initialized()) return 0;
  LM_CUDA(cudaGetDevice(&device));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
  return stats.reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

void synchronize(StreamView stream) {
  if (stream.device == DeviceType::kCuda) {
    LM_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)));
  }
}

}  // namespace lm
