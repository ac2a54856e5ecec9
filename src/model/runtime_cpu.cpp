#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include "base/error.h"
#include "model/runtime.h"

namespace lm {

StreamView start_torch(DeviceType device, int threads, bool deterministic) {
  if (device != DeviceType::kCpu) {
    throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                    .what = "this executable has no CUDA code",
                                    .place = "",
                                    .next = "run lmlaunch with --gpus 0, or build with CUDA",
                                    .kept = ""});
  }
  static const c10::InferenceMode no_autograd(true);
  at::set_num_threads(threads);
  at::globalContext().setDeterministicAlgorithms(deterministic, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  return {DeviceType::kCpu, nullptr, threads};
}

void cap_library_memory(int64_t) {}

int64_t library_device_bytes() {
  return 0;
}

}  // namespace lm
