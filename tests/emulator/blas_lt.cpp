// cuBLASLt as far as src/kernels/gemm_cuda.cpp uses it. An algorithm holds for what it was found for: the
// shapes and strides, and addresses as aligned as was said. Two are found for a product, the second with a
// workspace, as one that splits the sum has; both compute the same.
#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "blas.h"
#include "emulator.h"

namespace {

struct Description {
  bool tf32 = false, transposed[2] = {false, false};
};
struct Layout {
  cudaDataType type;
  int64_t rows, columns, stride;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};
};
// In the place of cuBLASLt's own.
struct Algorithm {
  uint64_t problem;
  uint64_t workspace;
  uint32_t alignment[4];
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));
constexpr uint64_t kSplit = 1 << 20;

template <class T, class Handle>
T& of(Handle h) {
  return *reinterpret_cast<T*>(const_cast<void*>(static_cast<const void*>(h)));
}

template <class T>
cublasStatus_t set(T& to, const void* from, size_t bytes) {
  if (from == nullptr || bytes != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
  return std::memcpy(&to, from, bytes), CUBLAS_STATUS_SUCCESS;
}

struct Shape {
  int64_t m, n, k;
};
// Of no columns where the matrices do not go together.
Shape shape_of(const Description& d, const Layout& a, const Layout& b, const Layout& c, const Layout& out) {
  const int64_t m = d.transposed[0] ? a.columns : a.rows, k = d.transposed[0] ? a.rows : a.columns;
  const int64_t n = d.transposed[1] ? b.rows : b.columns, inner = d.transposed[1] ? b.columns : b.rows;
  const bool goes = k == inner && out.rows == m && out.columns == n && c.rows == m && c.columns == n;
  return {m, goes ? n : 0, k};
}
bool multiplies(const Layout& a, const Layout& b, const Layout& c, const Layout& out) {
  return c.type == out.type && a.type == b.type && (out.type == a.type || out.type == CUDA_R_32F);
}

uint64_t number_of(const Description& d, const Layout* const (&layouts)[4]) {
  uint64_t h = d.tf32 | d.transposed[0] << 1 | d.transposed[1] << 2;
  for (const Layout* x : layouts) {
    for (const int64_t v : {static_cast<int64_t>(x->type), x->rows, x->columns, x->stride})
      h = (h ^ static_cast<uint64_t>(v)) * 0x9E3779B97F4A7C15U;
  }
  return h;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t* out) {
  static int handle = 0;
  return *out = reinterpret_cast<cublasLtHandle_t>(&handle), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t type,
                                        cudaDataType_t scale) {
  if (scale != CUDA_R_32F || (type != CUBLAS_COMPUTE_32F && type != CUBLAS_COMPUTE_32F_FAST_TF32))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  auto* const description = new Description{.tf32 = type == CUBLAS_COMPUTE_32F_FAST_TF32};
  return *out = reinterpret_cast<cublasLtMatmulDesc_t>(description), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  return delete &of<Description>(d), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t which,
                                              const void* from, size_t bytes) {
  const bool first = which == CUBLASLT_MATMUL_DESC_TRANSA;
  if (!first && which != CUBLASLT_MATMUL_DESC_TRANSB) return CUBLAS_STATUS_NOT_SUPPORTED;
  int32_t operation = 0;
  const cublasStatus_t status = set(operation, from, bytes);
  of<Description>(d).transposed[first ? 0 : 1] = operation == CUBLAS_OP_T;
  return status;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
  if (rows == 0 || columns == 0 || stride < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  auto* const layout = new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), stride};
  return *out = reinterpret_cast<cublasLtMatrixLayout_t>(layout), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return delete &of<Layout>(layout), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  return *out = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  return delete &of<Preference>(p), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void* from, size_t bytes) {
  Preference& preference = of<Preference>(p);
  switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set(preference.workspace, from, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return set(preference.schemes, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set(preference.alignment[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], from, bytes);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t p, int asked,
                                              cublasLtMatmulHeuristicResult_t results[], int* count) {
  const Layout* const layouts[] = {&of<Layout>(a), &of<Layout>(b), &of<Layout>(c), &of<Layout>(out)};
  const Description& description = of<Description>(d);
  const Preference& preference = of<Preference>(p);
  *count = 0;
  if (shape_of(description, *layouts[0], *layouts[1], *layouts[2], *layouts[3]).n == 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!multiplies(*layouts[0], *layouts[1], *layouts[2], *layouts[3])) return CUBLAS_STATUS_NOT_SUPPORTED;
  const bool splits = (preference.schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
  for (const uint64_t workspace : {uint64_t{0}, kSplit}) {
    if (*count == asked || workspace > preference.workspace || (workspace > 0 && !splits)) break;
    Algorithm algorithm{number_of(description, layouts), workspace, {}};
    std::copy_n(preference.alignment, 4, algorithm.alignment);
    cublasLtMatmulHeuristicResult_t& result = results[(*count)++];
    result = {};
    result.workspaceSize = workspace;
    std::memcpy(&result.algo, &algorithm, sizeof algorithm);
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b,
                              const void* beta, const void* C, cublasLtMatrixLayout_t c, void* D,
                              cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t bytes, cudaStream_t stream) {
  const Layout* const layouts[] = {&of<Layout>(a), &of<Layout>(b), &of<Layout>(c), &of<Layout>(out)};
  const Description& description = of<Description>(d);
  if (algo == nullptr) return CUBLAS_STATUS_NOT_SUPPORTED;
  Algorithm algorithm;
  std::memcpy(&algorithm, algo, sizeof algorithm);
  if (algorithm.problem != number_of(description, layouts) || algorithm.workspace > bytes ||
      (algorithm.workspace > 0 && !emulator::device_can_use(workspace)))
    return CUBLAS_STATUS_INVALID_VALUE;
  const void* const operands[] = {A, B, C, D};
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(operands[i]) % algorithm.alignment[i] != 0)
      return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!multiplies(*layouts[0], *layouts[1], *layouts[2], *layouts[3])) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (C == D && (layouts[2]->stride != layouts[3]->stride)) return CUBLAS_STATUS_INVALID_VALUE;
  const Shape shape = shape_of(description, *layouts[0], *layouts[1], *layouts[2], *layouts[3]);
  return emulator::multiply(stream, {shape.m,
                                     shape.n,
                                     shape.k,
                                     *static_cast<const float*>(alpha),
                                     {A, layouts[0]->type, description.transposed[0], layouts[0]->stride},
                                     {B, layouts[1]->type, description.transposed[1], layouts[1]->stride},
                                     *static_cast<const float*>(beta),
                                     {C, layouts[2]->stride},
                                     {D, layouts[3]->stride},
                                     layouts[3]->type,
                                     description.tf32});
}
}
#pragma GCC visibility pop
