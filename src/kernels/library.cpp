#include "kernels/library.h"

#include <fmt/format.h>

#include <ATen/ScalarOps.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>

#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/gemm_few_rows.h"
#include "kernels/gemm_panels.h"

namespace lm {
namespace {

std::string matrix_text(const View& x, bool transposed) {
  return fmt::format("{} [{}, {}]{} with rows {} elements apart", dtype_name(x.dtype), x.rows, x.columns,
                     transposed ? ", transposed," : "", x.stride);
}

// Another library's product would take memory that no plan has, and have other bits.
Error no_algorithm(const Gemm& g) {
  const GpuInfo gpu = cuda_device(cuda_selected());
  const bool fp32 = g.a.dtype == DType::kF32 && g.b.dtype == DType::kF32;
  return Error(Exit::kInternal,
               {.area = "GPU-34",
                .what = fmt::format("cuBLASLt has no algorithm for a product: {} by {} to {}{}",
                                    matrix_text(g.a, g.transpose_a), matrix_text(g.b, g.transpose_b),
                                    matrix_text(g.out, false), g.addend.defined() ? ", added up" : ""),
                .place = fmt::format("{}, compute capability {}.{}", gpu.name, gpu.major, gpu.minor),
                .next = std::string(fp32 ? "" : "set model.dtype = \"fp32\", or ") +
                        "use another GPU; and report this message"});
}

void gemm(const Gemm& g, StreamView stream) {
  if (stream.device == DeviceType::kCuda) {
    if (!gemm_cuda(g, stream)) throw no_algorithm(g);
    return;
  }
  // Of fp16 LibTorch has plain loops on most processors.
  const bool ours = g.a.dtype == DType::kF16 ||
                    (g.a.dtype == DType::kBF16 && !library_multiplies_bf16(best_instructions()));
  if (ours) return kernels(DeviceType::kCpu).gemm(g, stream);
  if (multiplies_few_rows(g)) return gemm_few_rows(g, stream.threads);
  const at::Tensor a = tensor_of(g.a, stream.device), b = tensor_of(g.b, stream.device);
  const at::Tensor left = g.transpose_a ? a.t() : a, right = g.transpose_b ? b.t() : b;
  at::Tensor out = tensor_of(g.out, stream.device);
  if (g.addend.defined()) {
    const bool elsewhere = g.addend.data != g.out.data;
    const at::Tensor addend = elsewhere ? tensor_of(g.addend, stream.device) : out;
    at::addmm_out(out, addend, left, right, g.addend_scale, g.scale);
  } else if (g.scale != 1) {
    at::addmm_out(out, out, left, right, 0, g.scale);  // with a factor of 0 the addend is not read
  } else {
    at::mm_out(out, left, right);
  }
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
