#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

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

void cap_library_memory(int64_t bytes) {
  const auto index = c10::cuda::current_device();
  const double total = static_cast<double>(cuda_device(index).total_bytes);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(std::min(1.0, static_cast<double>(bytes) / total),
                                                     index);
}

}  // namespace lm
