// cuBLAS as far as LibTorch's mm, addmm and baddbmm use it, so that LibTorch's own host code runs: its
// checks, its choice of transposes and leading dimensions, its workspace out of the caching allocator. The
// product is the CPU's, summed in fp32 and rounded once; with TF32 math fp32 factors are rounded to 10 bits
// of mantissa first.
#include <ATen/ATen.h>

#include "blas.h"
#include "emulator.h"

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

at::ScalarType scalar(cudaDataType type) {
  switch (type) {
    case CUDA_R_32F:
      return at::kFloat;
    case CUDA_R_16BF:
      return at::kBFloat16;
    case CUDA_R_16F:
      return at::kHalf;
    default:
      throw std::runtime_error("emulator: an element type of cublasGemmEx");
  }
}

struct Matrix {
  void* data;
  int64_t rows, columns, stride;  // row-major
  at::ScalarType type;
  at::Tensor tensor() const {
    return at::from_blob(emulator::inside(data), {rows, columns}, {stride, 1},
                         at::TensorOptions().dtype(type));
  }
  emulator::Access access(bool write) const {
    const auto size = static_cast<int64_t>(c10::elementSize(type));
    return {data, columns * size, write, rows, stride * size};
  }
};

at::Tensor factor(const at::Tensor& x, bool tf32) {
  if (!tf32 || x.scalar_type() != at::kFloat) return x.to(at::kFloat);
  return x.view(at::kInt).add(0x1000).bitwise_and(~0x1FFF).view(at::kFloat);
}

// Whoever asks has its stream, and whether fp32 factors are rounded, in the handle.
cublasStatus_t gemm(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                    float alpha, const void* A, cudaDataType at_, int64_t lda, const void* B, cudaDataType bt,
                    int64_t ldb, float beta, void* C, cudaDataType ct, int64_t ldc) {
  const Handle& h = *reinterpret_cast<Handle*>(handle);
  return emulator::multiply(h.stream, {m,
                                       n,
                                       k,
                                       alpha,
                                       {A, at_, ta != CUBLAS_OP_N, lda},
                                       {B, bt, tb != CUBLAS_OP_N, ldb},
                                       beta,
                                       {C, ldc},
                                       {C, ldc},
                                       ct,
                                       h.math == CUBLAS_TF32_TENSOR_OP_MATH});
}

// So many of them: operand i of a matrix lies i strides behind the first.
struct Batch {
  int64_t a, b, c;
  int count;
};
cublasStatus_t gemms(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                     float alpha, const void* A, cudaDataType at_, int64_t lda, const void* B,
                     cudaDataType bt, int64_t ldb, float beta, void* C, cudaDataType ct, int64_t ldc,
                     const Batch& batch) {
  const auto moved = [](const void* p, cudaDataType type, int64_t elements) {
    return static_cast<const char*>(p) + elements * static_cast<int64_t>(c10::elementSize(scalar(type)));
  };
  for (int i = 0; i < batch.count; ++i) {
    const cublasStatus_t status =
        gemm(handle, ta, tb, m, n, k, alpha, moved(A, at_, i * batch.a), at_, lda, moved(B, bt, i * batch.b),
             bt, ldb, beta, const_cast<char*>(moved(C, ct, i * batch.c)), ct, ldc);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return CUBLAS_STATUS_SUCCESS;
}

Handle& of(cublasHandle_t h) {
  return *reinterpret_cast<Handle*>(h);
}

}  // namespace

namespace emulator {

// Column-major D = alpha op(A) op(B) + beta C is, row-major, D[n, m] = alpha b[n, k] a[k, m] + beta C.
cublasStatus_t multiply(cudaStream_t stream, const Product& p) {
  if (p.m == 0 || p.n == 0) return CUBLAS_STATUS_SUCCESS;
  const bool na = !p.a.transposed, nb = !p.b.transposed;
  if (p.a.stride < (na ? p.m : p.k) || p.b.stride < (nb ? p.k : p.n) || p.c.stride < p.m || p.d.stride < p.m)
    return CUBLAS_STATUS_INVALID_VALUE;
  const Matrix a{const_cast<void*>(p.a.data), na ? p.k : p.m, na ? p.m : p.k, p.a.stride, scalar(p.a.type)},
      b{const_cast<void*>(p.b.data), nb ? p.n : p.k, nb ? p.k : p.n, p.b.stride, scalar(p.b.type)};
  const Matrix c{const_cast<void*>(p.c.data), p.n, p.m, p.c.stride, scalar(p.type)},
      d{const_cast<void*>(p.d.data), p.n, p.m, p.d.stride, scalar(p.type)};
  for (const Matrix& x : {a, b, c, d}) {
    if (!device_can_use(x.data)) fault("a GEMM on memory that the device cannot use");
  }
  std::vector<Access> accesses = {a.access(false), b.access(false)};
  if (p.beta != 0) accesses.push_back(c.access(false));
  accesses.push_back(d.access(true));
  enqueue(
      stream, Kind::kGemm,
      "gemm " + std::to_string(p.m) + "x" + std::to_string(p.n) + "x" + std::to_string(p.k),
      [=] {
        const c10::InferenceMode guard;
        const at::Tensor x = nb ? b.tensor() : b.tensor().t(), y = na ? a.tensor() : a.tensor().t();
        at::Tensor sum = at::mm(factor(x, p.tf32), factor(y, p.tf32));
        if (p.alpha != 1) sum.mul_(p.alpha);
        if (p.beta != 0) sum.add_(c.tensor().to(at::kFloat), p.beta);
        d.tensor().copy_(sum);
      },
      std::move(accesses));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace emulator

#pragma GCC visibility push(default)
extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t* out) {
  return *out = reinterpret_cast<cublasHandle_t>(new Handle), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
  return delete &of(h), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
  return of(h).stream = s, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) {
  return of(h).math = m, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t* m) {
  return *m = of(h).math, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) {
  return of(h).pointers = m, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t* m) {
  return *m = of(h).pointers, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void* alpha, const void* A, cudaDataType at_, int lda, const void* B,
                            cudaDataType bt, int ldb, const void* beta, void* C, cudaDataType ct, int ldc,
                            cublasComputeType_t, cublasGemmAlgo_t) {
  return gemm(h, ta, tb, m, n, k, *static_cast<const float*>(alpha), A, at_, lda, B, bt, ldb,
              *static_cast<const float*>(beta), C, ct, ldc);
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                              int k, const float* alpha, const float* A, int lda, const float* B, int ldb,
                              const float* beta, float* C, int ldc) {
  return gemm(h, ta, tb, m, n, k, *alpha, A, CUDA_R_32F, lda, B, CUDA_R_32F, ldb, *beta, C, CUDA_R_32F, ldc);
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                          int n, int k, const void* alpha, const void* A, cudaDataType at_,
                                          int lda, long long a, const void* B, cudaDataType bt, int ldb,
                                          long long b, const void* beta, void* C, cudaDataType ct, int ldc,
                                          long long c, int count, cublasComputeType_t, cublasGemmAlgo_t) {
  return gemms(h, ta, tb, m, n, k, *static_cast<const float*>(alpha), A, at_, lda, B, bt, ldb,
               *static_cast<const float*>(beta), C, ct, ldc, {a, b, c, count});
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                         int n, int k, const float* alpha, const float* A, int lda,
                                         long long a, const float* B, int ldb, long long b, const float* beta,
                                         float* C, int ldc, long long c, int count) {
  return gemms(h, ta, tb, m, n, k, *alpha, A, CUDA_R_32F, lda, B, CUDA_R_32F, ldb, *beta, C, CUDA_R_32F, ldc,
               {a, b, c, count});
}
}
#pragma GCC visibility pop
