// Products of matrices on a GPU against fp64: every type, whatever lies transposed or apart, with an addend
// in place or elsewhere. And what decides on their bits: not where matrices lie, nor what came before.
#include <array>

#include "base/arena.h"
#include "base/cuda.h"
#include "base/error.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Types {
  DType factors, out;
};
constexpr Types kTypes[] = {{DType::kF32, DType::kF32},
                            {DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32},
                            {DType::kF16, DType::kF16},
                            {DType::kF16, DType::kF32}};

double relative_error(DType type) {
  return type == DType::kBF16 ? 1.0 / 128 : type == DType::kF16 ? 1.0 / 1024 : 4e-6;
}

class ProductsOnAGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
    static const StreamView started = start_torch(DeviceType::kCuda, 2, true);
    stream = started;
  }

  // A matrix on the device, some elements behind the start of its memory.
  struct Matrix {
    Values values;  // with what is between its rows
    Memory memory;
    View view;
  };
  Matrix placed(Values values, int64_t rows, int64_t columns, int64_t shift = 0) const {
    const auto size = static_cast<int64_t>(dtype_size(values.dtype()));
    Memory memory(DeviceType::kCuda, (values.size() + shift) * size);
    auto* const first = static_cast<std::byte*>(memory.data()) + shift * size;
    copy_bytes(first, values.data(), values.size() * size, stream);
    synchronize(stream);
    const View view{first, values.dtype(), rows, columns, values.size() / rows};
    return {std::move(values), std::move(memory), view};
  }
  Matrix noise(DType type, std::array<int64_t, 2> sizes, int64_t gap, uint32_t seed,
               int64_t shift = 0) const {
    return placed(Values::random(type, sizes[0] * (sizes[1] + gap), seed), sizes[0], sizes[1], shift);
  }
  Values read(const Matrix& matrix) const {
    Values out = matrix.values;
    const auto size = static_cast<int64_t>(dtype_size(out.dtype()));
    copy_bytes(out.data(), matrix.view.data, out.size() * size, stream);
    synchronize(stream);
    return out;
  }
  void multiply(const Gemm& g) const { library_kernels(DeviceType::kCuda).gemm(g, stream); }

  StreamView stream;
};

// What `g` should give, in fp64, with the gaps of `before`.
std::vector<double> expected(const Gemm& g, const Values& a, const Values& b, const Values* addend,
                             const Values& before) {
  const int64_t inner = g.transpose_a ? g.a.rows : g.a.columns;
  std::vector<double> want;
  for (int64_t r = 0; r < g.out.rows; ++r) {
    for (int64_t c = 0; c < g.out.stride; ++c) {
      double sum = 0;
      for (int64_t i = 0; c < g.out.columns && i < inner; ++i)
        sum += (g.transpose_a ? a[i * g.a.stride + r] : a[r * g.a.stride + i]) *
               (g.transpose_b ? b[c * g.b.stride + i] : b[i * g.b.stride + c]);
      const double added = addend == nullptr ? 0 : g.addend_scale * (*addend)[r * g.addend.stride + c];
      want.push_back(c < g.out.columns ? g.scale * sum + added : before[r * g.out.stride + c]);
    }
  }
  return want;
}

// Shifts and gaps make addresses and strides that are no multiple of 16 bytes, or of 4.
TEST_F(ProductsOnAGpu, AreThoseOfFp64) {
  enum Added { kNothing, kInPlace, kElsewhere };
  const std::vector<std::array<int64_t, 3>> sizes = {{1, 1, 1},  {1, 24, 40},   {24, 1, 40},
                                                     {5, 17, 3}, {64, 96, 128}, {48, 40, 300}};
  for (const Types& types : kTypes) {
    for (const auto& [rows, columns, inner] : sizes) {
      for (int way = 0; way < 12; ++way) {
        const bool transpose_a = way & 1, transpose_b = way & 2;
        const auto added = static_cast<Added>(way / 4);
        const int64_t gap = inner == 3 ? 3 : 8, shift = inner == 3 ? 1 : 0;
        SCOPED_TRACE(dtype_text(types.factors) + " to " + dtype_text(types.out) + ", " +
                     std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(inner) +
                     (transpose_a ? " a^T" : "") + (transpose_b ? " b^T" : "") + ", addend " +
                     std::to_string(added));
        const std::array<int64_t, 2> of_a{transpose_a ? inner : rows, transpose_a ? rows : inner},
            of_b{transpose_b ? columns : inner, transpose_b ? inner : columns};
        const Matrix a = noise(types.factors, of_a, gap, 1, shift),
                     b = noise(types.factors, of_b, gap, 2, shift),
                     out = noise(types.out, {rows, columns}, gap, 3, shift),
                     other = noise(types.out, {rows, columns}, 2 * gap, 4, shift);
        Gemm g{.a = a.view,
               .b = b.view,
               .out = out.view,
               .transpose_a = transpose_a,
               .transpose_b = transpose_b};
        if (way % 3 != 0) g.scale = 0.75F;
        if (added != kNothing) g.addend = added == kInPlace ? out.view : other.view, g.addend_scale = -1.5F;
        multiply(g);
        const Values* const addend = added == kNothing   ? nullptr
                                     : added == kInPlace ? &out.values
                                                         : &other.values;
        expect_near(read(out), expected(g, a.values, b.values, addend, out.values), relative_error(types.out),
                    2e-5 + 2e-3 * relative_error(types.factors), "product");
        EXPECT_TRUE(read(other) == other.values) << "the addend was written";
      }
    }
  }
}

// Of no factors an addend is all there is; of no rows, nothing.
TEST_F(ProductsOnAGpu, OfNothingAreTheirAddend) {
  const Matrix a = noise(DType::kBF16, {8, 16}, 0, 1), b = noise(DType::kBF16, {16, 24}, 0, 2),
               out = noise(DType::kF32, {8, 24}, 8, 3), other = noise(DType::kF32, {8, 24}, 0, 4);
  Gemm none{.a = a.view, .b = b.view, .out = out.view};
  none.a.columns = none.b.rows = 0;
  none.addend = other.view;
  none.addend_scale = 2;
  multiply(none);
  Values got = read(out);
  for (int64_t r = 0; r < 8; ++r)
    for (int64_t c = 0; c < 24; ++c) EXPECT_EQ(got[r * 32 + c], 2 * other.values[r * 24 + c]);
  none.addend = {};
  multiply(none);
  got = read(out);
  for (int64_t r = 0; r < 8; ++r) {
    for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(got[r * 32 + c], c < 24 ? 0 : out.values[r * 32 + c]);
  }
  Gemm empty{.a = a.view, .b = b.view, .out = out.view};
  empty.a.rows = empty.out.rows = 0;
  multiply(empty);
  EXPECT_TRUE(read(out) == got);
}

// Shapes, types and the card are what a report of it needs; other products are computed as before.
TEST_F(ProductsOnAGpu, WithoutAnAlgorithmAreNamed) {
  const Matrix a = noise(DType::kBF16, {8, 16}, 8, 1), b = noise(DType::kF16, {24, 16}, 0, 2),
               out = noise(DType::kF32, {8, 24}, 0, 3), same = noise(DType::kBF16, {24, 16}, 0, 2);
  for (int times = 0; times < 2; ++times) {
    try {
      multiply({.a = a.view, .b = b.view, .out = out.view, .transpose_b = true});
      FAIL() << "no library multiplies bf16 by fp16";
    } catch (const Error& error) {
      EXPECT_EQ(
          error.text().what,
          "cuBLASLt has no algorithm for a product: bf16 [8, 16] with rows 24 elements apart by fp16 [24, "
          "16], transposed, with rows 16 elements apart to fp32 [8, 24] with rows 24 elements apart");
      EXPECT_EQ(error.text().place.find(cuda_device(0).name + ", compute capability "), 0U);
      EXPECT_NE(error.text().next.find("model.dtype = \"fp32\""), std::string::npos);
    }
  }
  EXPECT_TRUE(read(out) == out.values);
  multiply({.a = a.view, .b = same.view, .out = out.view, .transpose_b = true});
  EXPECT_FALSE(read(out) == out.values);
}

// Where a slot or an arena begins is a matter of placement.
TEST_F(ProductsOnAGpu, HaveTheSameBitsWhereverTheirMatricesLie) {
  std::vector<Values> results;
  for (const int64_t shift : {0, 8, 16, 64}) {  // elements: multiples of 16 bytes
    const Matrix a = noise(DType::kBF16, {256, 512}, 0, 1, shift),
                 b = noise(DType::kBF16, {384, 512}, 0, 2, shift),
                 out = noise(DType::kBF16, {256, 384}, 0, 3, shift);
    multiply({.a = a.view, .b = b.view, .out = out.view, .transpose_b = true});
    results.push_back(read(out));
    EXPECT_TRUE(results.back() == results.front()) << "shifted by " << shift;
  }
}

// More shapes than are kept.
TEST_F(ProductsOnAGpu, HaveTheSameBitsWhateverCameBefore) {
  constexpr int64_t kShapes = 4200;
  const Matrix a = noise(DType::kBF16, {1, kShapes}, 0, 1), b = noise(DType::kBF16, {1, kShapes}, 0, 2),
               out = noise(DType::kF32, {1, 1}, 0, 3);
  const auto product = [&](int64_t inner) {
    multiply({.a = a.view.column_range(0, inner),
              .b = b.view.column_range(0, inner),
              .out = out.view,
              .transpose_b = true});
  };
  product(1000);
  const Values before = read(out);
  for (int64_t inner = 1; inner <= kShapes; ++inner) product(inner);
  EXPECT_FALSE(read(out) == before);
  product(1000);
  EXPECT_TRUE(read(out) == before);
}

// TF32 would round both factors to 10 bits, and 1 + 2^-12 to 1.
TEST_F(ProductsOnAGpu, RoundTheirFactorsToTf32WhereThatIsAllowedAlone) {
  Values x(DType::kF32, 64 * 64), one(DType::kF32, 64 * 64), ones(DType::kF32, 64 * 64);
  for (int64_t i = 0; i < x.size(); ++i) {
    x.set(i, 1 + 0x1p-12);
    one.set(i, i % 65 == 0 ? 1 : 0);
    ones.set(i, 1);
  }
  const Matrix a = placed(x, 64, 64), b = placed(one, 64, 64), out = placed(one, 64, 64);
  const auto product = [&] {
    multiply({.a = a.view, .b = b.view, .out = out.view});
    return read(out);
  };
  EXPECT_TRUE(product() == x);
  allow_tf32(true);
  const Values rounded = product();
  allow_tf32(false);
  EXPECT_TRUE(rounded == ones);
  EXPECT_TRUE(product() == x);
}

}  // namespace
}  // namespace lm
