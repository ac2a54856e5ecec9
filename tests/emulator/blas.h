// A product as cuBLAS and cuBLASLt describe it, by columns: D = alpha op(A) op(B) + beta C.
#pragma once

#include <cublas_v2.h>

namespace emulator {

struct Factor {
  const void* data;
  cudaDataType type;
  bool transposed;
  int64_t stride;
};
struct Sum {
  const void* data;
  int64_t stride;
};
struct Product {
  int64_t m, n, k;
  float alpha;
  Factor a, b;
  float beta;
  Sum c, d;
  cudaDataType type;  // of C and D
  bool tf32;
};

// Into the stream; what cuBLAS refuses it refuses.
cublasStatus_t multiply(cudaStream_t stream, const Product& product);

}  // namespace emulator
