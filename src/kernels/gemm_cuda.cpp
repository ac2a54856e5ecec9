// Products of matrices on GPUs by cuBLASLt: the addend may lie elsewhere than the result, and the result may
// be wider than the factors. Of a product's algorithms it takes the library's first. That follows from the
// product, the card and the library alone, all of which a run records: never from a time, an address or what
// came before. So a resumed run, and one whose state lies elsewhere, have the same bits.
#include <ATen/Context.h>
#include <ATen/cuda/Exceptions.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>

#include <bit>
#include <map>
#include <memory>
#include <vector>

#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/library.h"

namespace lm {
namespace {

// Bytes: what the widest loads of a kernel need. Whether an address is a multiple of more is a matter of
// placement, which must not choose an algorithm.
constexpr uintptr_t kMostAlignment = 16;
// Of shapes, each some hundred bytes: documents of any length make ever new ones.
constexpr size_t kMostProducts = 4096;

template <auto destroy>
struct Destroys {
  template <class T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};
using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroys<cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroys<cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroys<cublasLtMatmulPreferenceDestroy>>;

// A matrix as cuBLAS sees it: our rows are its columns, and so each of ours is transposed.
struct Operand {
  cudaDataType type;
  int64_t rows, columns, stride;
  uint32_t alignment;  // bytes
  auto operator<=>(const Operand&) const = default;
};

// All that an algorithm is chosen by.
struct Problem {
  Operand left, right, addend, out;  // left is our b, right our a; addend is out where that is added to
  bool transpose_left, transpose_right, tf32, elsewhere;
  int choice;  // of the algorithms that the library proposes
  auto operator<=>(const Problem&) const = default;
};

struct Product {
  Description description;
  Layout left, right, addend, out;  // addend: null unless it is elsewhere
  cublasLtMatmulAlgo_t algorithm;
  bool found = false;
};

cudaDataType type_of(DType type) {
  LM_CHECK(type == DType::kF32 || type == DType::kBF16 || type == DType::kF16, dtype_name(type));
  return type == DType::kF32 ? CUDA_R_32F : type == DType::kBF16 ? CUDA_R_16BF : CUDA_R_16F;
}

Operand operand(const View& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  // Of a single row any stride will do.
  const int64_t stride = view.rows == 1 ? view.columns : view.stride;
  const auto alignment = uintptr_t{1} << std::countr_zero(address | kMostAlignment);
  return {type_of(view.dtype), view.columns, view.rows, stride, static_cast<uint32_t>(alignment)};
}

Problem problem_of(const Gemm& g, int choice) {
  const bool elsewhere = g.addend.defined() && g.addend.data != g.out.data;
  const Operand out = operand(g.out);
  return {operand(g.b),
          operand(g.a),
          elsewhere ? operand(g.addend) : out,
          out,
          g.transpose_b,
          g.transpose_a,
          g.a.dtype == DType::kF32 && at::globalContext().allowTF32CuBLAS(),
          elsewhere,
          choice};
}

Layout layout_of(const Operand& x) {
  cublasLtMatrixLayout_t layout = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, x.type, static_cast<uint64_t>(x.rows),
                                                  static_cast<uint64_t>(x.columns), x.stride));
  return Layout(layout);
}

Description description_of(const Problem& p) {
  cublasLtMatmulDesc_t description = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulDescCreate(
      &description, p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  Description out(description);
  const auto transpose = [&](cublasLtMatmulDescAttributes_t which, bool transposed) {
    const int32_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    TORCH_CUDABLAS_CHECK(cublasLtMatmulDescSetAttribute(description, which, &operation, sizeof operation));
  };
  transpose(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_left);
  transpose(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_right);
  return out;
}

Preference preference_of(const Problem& p) {
  cublasLtMatmulPreference_t preference = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  Preference out(preference);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kGemmWorkspace});
  // A sum that is split is added up in fp32.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.left.alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.right.alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.addend.alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.out.alignment);
  return out;
}

// The compute thread's, of its one card and stream. Never destroyed: when the program ends, CUDA may have
// ended before.
class Products {
 public:
  static Products& of_this_card() {
    static auto* const products = new Products;
    return *products;
  }

  bool multiply(const Gemm& g, int choice) {
    const Problem problem = problem_of(g, choice);
    const Product& p = product_of(problem);
    if (!p.found) return false;
    const float scale = g.scale, addend_scale = g.addend.defined() ? g.addend_scale : 0;
    const Layout& addend = problem.elsewhere ? p.addend : p.out;
    TORCH_CUDABLAS_CHECK(cublasLtMatmul(
        handle_, p.description.get(), &scale, g.b.data, p.left.get(), g.a.data, p.right.get(), &addend_scale,
        problem.elsewhere ? g.addend.data : g.out.data, addend.get(), g.out.data, p.out.get(), &p.algorithm,
        workspace_.get(), kGemmWorkspace, c10::cuda::getCurrentCUDAStream().stream()));
    return true;
  }

 private:
  Products() : workspace_(c10::cuda::CUDACachingAllocator::get()->allocate(kGemmWorkspace)) {
    TORCH_CUDABLAS_CHECK(cublasLtCreate(&handle_));
  }

  const Product& product_of(const Problem& problem) {
    const auto found = products_.find(problem);
    if (found != products_.end()) return found->second;
    if (products_.size() == kMostProducts) products_.clear();  // they are chosen again as they were
    return products_.emplace(problem, choose(problem)).first->second;
  }

  Product choose(const Problem& p) const {
    Product out{description_of(p),  layout_of(p.left),
                layout_of(p.right), p.elsewhere ? layout_of(p.addend) : nullptr,
                layout_of(p.out),   {}};
    std::vector<cublasLtMatmulHeuristicResult_t> proposed(static_cast<size_t>(p.choice) + 1);
    const Layout& addend = p.elsewhere ? out.addend : out.out;
    const Preference preference = preference_of(p);
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, out.description.get(), out.left.get(), out.right.get(), addend.get(), out.out.get(),
        preference.get(), p.choice + 1, proposed.data(), &count);
    // Of a product that it cannot compute at all; the caller knows which one that is.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return out;
    TORCH_CUDABLAS_CHECK(status);
    out.found = count > p.choice && proposed.back().state == CUBLAS_STATUS_SUCCESS;
    out.algorithm = proposed.back().algo;
    return out;
  }

  cublasLtHandle_t handle_ = nullptr;
  c10::DataPtr workspace_;  // one product after the other uses it
  std::map<Problem, Product> products_;
};

}  // namespace

bool gemm_cuda(const Gemm& g, StreamView stream, int choice) {
  LM_CHECK(!g.addend.defined() || g.addend.dtype == g.out.dtype, "an addend of the result's type");
  if (g.out.elements() == 0) return true;
  if ((g.transpose_a ? g.a.rows : g.a.columns) > 0) return Products::of_this_card().multiply(g, choice);
  // A sum of nothing.
  at::Tensor out = tensor_of(g.out, stream.device);
  if (!g.addend.defined()) {
    out.zero_();
    return true;
  }
  if (g.addend.data != g.out.data) out.copy_(tensor_of(g.addend, stream.device));
  out.mul_(g.addend_scale);
  return true;
}

}  // namespace lm
