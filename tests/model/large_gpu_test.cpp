// A product, SwiGLU and a copy whose matrix has more than 2^31 elements, as a micro-batch of 80,000 tokens
// makes in a model of 8 B parameters: its last rows, and those around the 2^31st element, against fp64.
#include "base/arena.h"
#include "base/cuda.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/kernels/support.h"
#include "tests/support/counts.h"

namespace lm {

int gpu_variants()
    __attribute__((weak));  // tests/emulator/device/variants.cpp: the emulated GPU alone has it

namespace {

constexpr int64_t kTokens = 80'000, kFfn = 14'336, kWidth = 2 * kFfn, kInner = 16;
constexpr int64_t kElements = kTokens * kWidth;
static_assert(kElements > int64_t{1} << 31);
// x, W; the product and its copy; what SwiGLU makes.
constexpr int64_t kBytes = 2 * (kTokens * kInner + kWidth * kInner + 2 * kElements + kElements / 2);

// Nonzero, and of few bits, so that sums of products are exact in fp32.
double element(int64_t row, int64_t k, int64_t period) {
  return static_cast<double>((row * 7 + k * 3) % period - period / 2) / 8 + 0.0625;
}

TEST(LargeMatrices, AreRightBeyondElement2To31) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  if (gpu_variants != nullptr && !test::full_counts())
    GTEST_SKIP() << "minutes on an emulated GPU: with LM_COUNTS=full";
  if (cuda_device(0).free_bytes < kBytes + (int64_t{1} << 30))
    GTEST_SKIP() << "the device has no " << kBytes << " bytes";
  const StreamView stream = start_torch(DeviceType::kCuda, 2, true);
  const Kernels& kernels = library_kernels(DeviceType::kCuda);
  const auto make = [&](int64_t rows, int64_t columns, Memory& memory) {
    memory = Memory(DeviceType::kCuda, rows * columns * 2);
    return View{memory.data(), DType::kBF16, rows, columns, columns};
  };
  Memory of_x, of_weight, of_product, of_copy, of_hidden;
  const View x = make(kTokens, kInner, of_x), weight = make(kWidth, kInner, of_weight),
             product = make(kTokens, kWidth, of_product), copy = make(kTokens, kWidth, of_copy),
             hidden = make(kTokens, kFfn, of_hidden);
  const auto fill = [&](const View& view, int64_t period) {
    Values values(DType::kBF16, view.elements());
    for (int64_t r = 0; r < view.rows; ++r)
      for (int64_t k = 0; k < kInner; ++k) values.set(r * kInner + k, element(r, k, period));
    copy_bytes(view.data, values.data(), view.elements() * 2, stream);
    synchronize(stream);
  };
  fill(x, 5);
  fill(weight, 7);
  kernels.gemm({.a = x, .b = weight, .out = product, .transpose_b = true}, stream);
  kernels.copy_rows({.from = product, .to = copy}, stream);
  kernels.gated_forward(
      {.gate_up = copy.data, .out = hidden.data, .rows = kTokens, .ffn = kFfn, .dtype = DType::kBF16},
      stream);

  const auto row_of = [&](const View& view, int64_t row) {
    Values out(DType::kBF16, view.columns);
    copy_bytes(out.data(), view.row_range(row, 1).data, view.columns * 2, stream);
    synchronize(stream);
    return out;
  };
  const int64_t at = (int64_t{1} << 31) / kWidth;
  for (const int64_t row : {int64_t{0}, at - 1, at, at + 1, (int64_t{1} << 31) / kFfn / 2, kTokens - 1}) {
    SCOPED_TRACE("row " + std::to_string(row));
    const Values got = row_of(product, row);
    std::vector<double> want, want_hidden;
    for (int64_t c = 0; c < kWidth; ++c) {
      double sum = 0;
      for (int64_t k = 0; k < kInner; ++k) sum += element(row, k, 5) * element(c, k, 7);
      want.push_back(got.rounded(sum));
    }
    for (int64_t c = 0; c < kFfn; ++c) {
      const double silu = got.rounded(want[c] / (1 + std::exp(-want[c])));
      want_hidden.push_back(silu * want[kFfn + c]);
    }
    expect_near(got, want, 0, 0, "product");
    expect_near(row_of(copy, row), want, 0, 0, "copy");
    expect_near(row_of(hidden, row), want_hidden, 2 * relative_bound(DType::kBF16), 1e-6, "SwiGLU");
  }
}

}  // namespace
}  // namespace lm
