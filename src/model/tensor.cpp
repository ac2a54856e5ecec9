#include "model/tensor.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include "base/error.h"

namespace lm {

at::ScalarType torch_type(DType type) {
  switch (type) {
    case DType::kF32:
      return at::kFloat;
    case DType::kBF16:
      return at::kBFloat16;
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

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kF32;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kDouble:
      return DType::kF64;
    case at::kInt:
      return DType::kI32;
    case at::kLong:
      return DType::kI64;
    default:
      LM_CHECK(false, "element type outside our set");
      return DType::kF32;
  }
}

at::Tensor view_memory(void* memory, at::IntArrayRef shape, DType type, DeviceType device) {
  const at::Device where(device == DeviceType::kCpu ? at::kCPU : at::kCUDA,
                         static_cast<c10::DeviceIndex>(device == DeviceType::kCpu ? -1 : 0));
  return at::for_blob(memory, shape)
      .options(at::TensorOptions().dtype(torch_type(type)).device(where))
      .target_device(where)
      .make_tensor();
}

at::Tensor arena_tensor(Arena& arena, at::IntArrayRef shape, DType type, DeviceType device) {
  const int64_t elements = c10::multiply_integers(shape);
  return view_memory(arena.allocate(elements * static_cast<int64_t>(dtype_size(type))), shape, type, device);
}

}  // namespace lm
