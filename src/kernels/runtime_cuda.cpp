#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <dlfcn.h>

#include <algorithm>

#include "kernels/aten.h"
#include "kernels/runtime.h"

namespace lm {

StreamView start_torch(DeviceType device, int threads, bool deterministic, int64_t) {
  static const c10::InferenceMode no_autograd(true);
  at::set_num_threads(threads);
  at::globalContext().setDeterministicAlgorithms(deterministic, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  if (device == DeviceType::kCpu) return {DeviceType::kCpu, nullptr, threads};
  // What torch's Python module does for its programs: the allocator, the streams.
  at::globalContext().lazyInitDevice(at::kCUDA);
  // Sums of 16-bit products stay in fp32 where cuBLAS splits them; LibTorch lets it round in between by
  // default.
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  at::globalContext().setAllowFP16ReductionCuBLAS(false);
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(true);
  c10::cuda::setCurrentCUDAStream(stream);
  return {DeviceType::kCuda, stream.stream(), threads};
}

void allow_tf32(bool allowed) {
  at::globalContext().setAllowTF32CuBLAS(allowed);
}

namespace {

// As cuBLAS and cuDNN write theirs: 13.1.0 is 130100, cuDNN's 9.19.0 is 91900. They are loaded with LibTorch.
std::string version_of(const char* function) {
  using Asked = size_t (*)();
  void* const found = dlsym(RTLD_DEFAULT, function);
  if (found == nullptr) return "";
  const size_t number = reinterpret_cast<Asked>(found)();
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
         std::to_string(number % 100);
}

}  // namespace

std::string library_versions(DeviceType device) {
  std::string out = torch_version();
  if (device == DeviceType::kCpu) return out;
  if (const std::string version = version_of("cublasLtGetVersion"); !version.empty())
    out += ", cuBLASLt " + version;
  if (const std::string version = version_of("cudnnGetVersion"); !version.empty())
    out += ", cuDNN " + version;
  return out;
}

void cap_library_memory(int64_t bytes) {
  const auto index = c10::cuda::current_device();
  const double total = static_cast<double>(cuda_device(index).total_bytes);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(std::min(1.0, static_cast<double>(bytes) / total),
                                                     index);
}

int64_t library_device_bytes() {
  if (!c10::cuda::CUDACachingAllocator::get()->initialized()) return 0;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  return stats.reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

}  // namespace lm
