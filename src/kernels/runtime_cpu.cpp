#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <malloc.h>

#include <cstdlib>
#include <string>

#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/runtime.h"

namespace lm {

StreamView start_torch(DeviceType device, int threads, bool deterministic, int64_t gemm_shapes) {
  if (device != DeviceType::kCpu) {
    throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                    .what = "this executable has no CUDA code",
                                    .place = "",
                                    .next = "run lmlaunch with --gpus 0, or build with CUDA"});
  }
  if (gemm_shapes > 0) {
    // oneDNN's own list of what it has made, and that of the layer which ATen puts above it. Both read these
    // when they are first used, whatever the process was started with; there is no other way to say it.
    const std::string shapes = std::to_string(gemm_shapes);
    setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", shapes.c_str(), 1);
    setenv("LRU_CACHE_CAPACITY", shapes.c_str(), 1);
  }
  // The GEMM library allocates workspaces of several MiB at every call, and what it keeps in pieces of 0.2
  // MiB. glibc takes both from one heap once a large block was freed, where the one leaves gaps that the
  // other does not fill: 240 MiB where 150 do, measured with 75 shapes up to 576 x 8192. Below 4 MiB steps
  // get slower.
  constexpr int kMapped = 4 << 20;
  mallopt(M_MMAP_THRESHOLD, kMapped);
  static const c10::InferenceMode no_autograd(true);
  at::set_num_threads(threads);
  at::globalContext().setDeterministicAlgorithms(deterministic, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  return {DeviceType::kCpu, nullptr, threads};
}

void allow_tf32(bool) {}

std::string library_versions(DeviceType) {
  return torch_version();
}

void cap_library_memory(int64_t) {}

int64_t library_device_bytes() {
  return 0;
}

}  // namespace lm
