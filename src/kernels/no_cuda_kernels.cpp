// kernels() for executables without CUDA code.
#include "base/error.h"
#include "kernels/cpu_features.h"

namespace lm {

const Kernels& kernels(DeviceType device) {
  if (device == DeviceType::kCpu) return cpu_kernels(cpu_level());
  throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                  .what = "this executable has no CUDA kernels",
                                  .place = "",
                                  .next = "run lmlaunch without --gpus, or build with CUDA"});
}

}  // namespace lm
