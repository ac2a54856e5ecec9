#include "kernels/library.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>

#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/gemm_panels.h"

namespace lm {
namespace {

// out = addend_scale addend + scale left right. On a GPU an addend elsewhere is copied to `out`, as LibTorch
// would copy it, and one of a single row or column, which LibTorch takes for a bias and gives to cuBLASLt, is
// added by a batch of one product: a sum like the others.
void add_product(at::Tensor out, const at::Tensor& left, const at::Tensor& right, const Gemm& g,
                 StreamView stream) {
  const bool widens = g.out.dtype != g.a.dtype, elsewhere = g.addend.data != g.out.data;
  at::Tensor addend = elsewhere ? tensor_of(g.addend, stream.device) : out;
  if (out.is_cuda() && elsewhere) addend = out.copy_(addend);
  if (out.is_cuda() && (out.size(0) == 1 || out.size(1) == 1)) {
    at::Tensor batch = out.unsqueeze(0);
    const at::Tensor a = left.unsqueeze(0), b = right.unsqueeze(0);
    widens ? at::baddbmm_out(batch, batch, a, b, out.scalar_type(), g.addend_scale, g.scale)
           : at::baddbmm_out(batch, batch, a, b, g.addend_scale, g.scale);
    return;
  }
  widens ? at::addmm_out(out, addend, left, right, out.scalar_type(), g.addend_scale, g.scale)
         : at::addmm_out(out, addend, left, right, g.addend_scale, g.scale);
}

void gemm(const Gemm& g, StreamView stream) {
  // Of fp16 LibTorch has plain loops on most processors.
  const bool ours = g.a.dtype == DType::kF16 ||
                    (g.a.dtype == DType::kBF16 && !library_multiplies_bf16(best_instructions()));
  if (stream.device == DeviceType::kCpu && ours) return kernels(DeviceType::kCpu).gemm(g, stream);
  const at::Tensor a = tensor_of(g.a, stream.device), b = tensor_of(g.b, stream.device);
  const at::Tensor left = g.transpose_a ? a.t() : a, right = g.transpose_b ? b.t() : b;
  at::Tensor out = tensor_of(g.out, stream.device);
  const bool widens = g.out.dtype != g.a.dtype;
  if (!g.addend.defined()) {
    // With a factor of 0 the addend is not read.
    if (g.scale != 1) {
      widens ? at::addmm_out(out, out, left, right, out.scalar_type(), 0, g.scale)
             : at::addmm_out(out, out, left, right, 0, g.scale);
      return;
    }
    widens ? at::mm_out(out, left, right, out.scalar_type()) : at::mm_out(out, left, right);
    return;
  }
  add_product(out, left, right, g, stream);
}

void copy_rows(const CopyRows& c, StreamView stream) {
  tensor_of(c.to, stream.device).copy_(tensor_of(c.from, stream.device));
}

void scale(const Scale& s, StreamView stream) {
  at::Tensor out = tensor_of(s.out, stream.device);
  if (s.device_factor != nullptr) {
    const View factor = view_of(const_cast<void*>(s.device_factor), s.x.dtype, 1);
    at::mul_out(out, tensor_of(s.x, stream.device), tensor_of(factor, stream.device));
    return;
  }
  // As a tensor: with a scalar ATen makes the product in memory of its own and copies it.
  at::mul_out(out, tensor_of(s.x, stream.device), at::native::wrapped_scalar_tensor(s.factor));
}

void zero(const View& x, StreamView stream) {
  if (x.elements() > 0) tensor_of(x, stream.device).zero_();
}

Kernels with_library(DeviceType device) {
  Kernels out = kernels(device);
  const bool cpu = device == DeviceType::kCpu;
  const auto attention_forward = cpu ? attention_forward_cpu : attention_forward_cuda;
  const auto attention_backward = cpu ? attention_backward_cpu : attention_backward_cuda;
#define LM_LIBRARY_KERNEL(name, Args) out.name = name;
#include "kernels/kernels.inc"
  out.attention_forward_scratch = cpu ? attention_forward_scratch_cpu : attention_forward_scratch_cuda;
  out.attention_backward_scratch = cpu ? attention_backward_scratch_cpu : attention_backward_scratch_cuda;
  return out;
}

}  // namespace

const Kernels& library_kernels(DeviceType device) {
  static const Kernels cpu = with_library(DeviceType::kCpu);
  if (device == DeviceType::kCpu) return cpu;
  static const Kernels cuda = with_library(DeviceType::kCuda);
  return cuda;
}

}  // namespace lm
