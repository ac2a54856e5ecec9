// ATen tensors over memory that somebody else owns (the arena, a block's flat array): a tensor here is a
// view, valid as long as that memory. Only the rank's compute thread makes and uses them.
//
// Legend of shapes in this folder: T rows of a micro-batch (DeviceBatch::rows), H hidden, F ffn, V
// vocabulary, R rows with a target, Q = (n_h + 2 n_kv) d rows of the fused q, k, v projection.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "base/arena.h"
#include "base/dtype.h"

namespace lm {

at::ScalarType torch_type(DType type);
DType dtype_of(const at::Tensor& tensor);

// A contiguous view of `memory`.
at::Tensor view_memory(void* memory, at::IntArrayRef shape, DType type, DeviceType device);

// Uninitialised memory from the arena, valid until the frame that holds it ends.
at::Tensor arena_tensor(Arena& arena, at::IntArrayRef shape, DType type, DeviceType device);

}  // namespace lm
