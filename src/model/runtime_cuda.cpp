#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>

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

}  // namespace lm
