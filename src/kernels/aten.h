// ATen tensors over borrowed memory: a tensor here is a view, valid as long as that memory. For use inside
// src/kernels, and for tests that compare with ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/dtype.h"
#include "base/view.h"

namespace lm {

// "LibTorch 2.11.0", from the loaded library.
std::string torch_version();

at::ScalarType torch_type(DType type);

// [rows, columns]
at::Tensor tensor_of(const View& view, DeviceType device);
at::Tensor tensor_of(void* memory, at::IntArrayRef shape, at::IntArrayRef strides, DType type,
                     DeviceType device);

}  // namespace lm
