#include "kernels/aten.h"

#include <ATen/Version.h>
#include <ATen/ops/from_blob.h>

#include "base/error.h"

namespace lm {

std::string torch_version() {
  const std::string config = at::show_config(), name = "TORCH_VERSION=";
  const size_t at = config.find(name);
  if (at == std::string::npos) return "LibTorch";
  const size_t from = at + name.size();
  return "LibTorch " + config.substr(from, config.find_first_of(", \n", from) - from);
}

at::ScalarType torch_type(DType type) {
  switch (type) {
    case DType::kF32:
      return at::kFloat;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF16:
      return at::kHalf;
    case DType::kF64:
      return at::kDouble;
    case DType::kI32:
      return at::kInt;
    case DType::kI64:
      return at::kLong;
    default:
      LM_CHECK(false, dtype_name(type));
      return at::kFloat;
  }
}

at::Tensor tensor_of(const View& view, DeviceType device) {
  return tensor_of(view.data, {view.rows, view.columns}, {view.stride, 1}, view.dtype, device);
}

at::Tensor tensor_of(void* memory, at::IntArrayRef shape, at::IntArrayRef strides, DType type,
                     DeviceType device) {
  const at::Device where(device == DeviceType::kCpu ? at::kCPU : at::kCUDA,
                         static_cast<c10::DeviceIndex>(device == DeviceType::kCpu ? -1 : 0));
  return at::for_blob(memory, shape)
      .strides(strides)
      .options(at::TensorOptions().dtype(torch_type(type)).device(where))
      .target_device(where)
      .make_tensor();
}

}  // namespace lm
