// cuBLAS as far as LibTorch's mm, addmm and baddbmm use it, so that LibTorch's own host code runs: its
// checks, its choice of transposes and leading dimensions, its workspace out of the caching allocator. The
// product is the CPU's, summed in fp32 and rounded once; with TF32 math fp32 factors are rounded to 10 bits
// of mantissa first.
#include <ATen/ATen.h>
#include <cublas_v2.h>

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

// Column-major C = alpha op(A) op(B) + beta C is, row-major, C[n, m] = alpha b[n, k] a[k, m] + beta C.
cublasStatus_t gemm(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                    float alpha, const void* A, cudaDataType at_, int64_t lda, const void* B, cudaDataType bt,
                    int64_t ldb, float beta, void* C, cudaDataType ct, int64_t ldc) {
  if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;
  const bool na = ta == CUBLAS_OP_N, nb = tb == CUBLAS_OP_N;
  if (lda < (na ? m : k) || ldb < (nb ? k : n) || ldc < m) return CUBLAS_STATUS_INVALID_VALUE;
  const Matrix a{const_cast<void*>(A), na ? k : m, na ? m : k, lda, scalar(at_)},
      b{const_cast<void*>(B), nb ? n : k, nb ? k : n, ldb, scalar(bt)};
  const Matrix c{C, n, m, ldc, scalar(ct)};
  for (const void* p : {A, B, static_cast<const void*>(C)}) {
    if (!emulator::device_can_use(p)) emulator::fault("a GEMM on memory that the device cannot use");
  }
  const bool tf32 = reinterpret_cast<Handle*>(handle)->math == CUBLAS_TF32_TENSOR_OP_MATH;
  std::vector<emulator::Access> accesses = {a.access(false), b.access(false)};
  if (beta != 0) accesses.push_back(c.access(false));
  accesses.push_back(c.access(true));
  emulator::enqueue(
      reinterpret_cast<Handle*>(handle)->stream, emulator::Kind::kGemm,
      "gemm " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k),
      [=] {
        const c10::InferenceMode guard;
        const at::Tensor x = nb ? b.tensor() : b.tensor().t(), y = na ? a.tensor() : a.tensor().t();
        at::Tensor sum = at::mm(factor(x, tf32), factor(y, tf32));
        if (alpha != 1) sum.mul_(alpha);
        const at::Tensor out = c.tensor();
        if (beta != 0) sum.add_(out.to(at::kFloat), beta);
        out.copy_(sum);
      },
      std::move(accesses));
  return CUBLAS_STATUS_SUCCESS;
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
