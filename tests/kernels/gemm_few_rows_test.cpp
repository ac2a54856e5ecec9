// Products of few rows with a large bf16 matrix, against fp64: rows that lie apart, odd numbers of them, any
// threads. Elsewhere than on a processor with AVX-512's instructions for bf16 there are none.
#include "kernels/gemm_few_rows.h"

#include <array>
#include <functional>

#include "base/processor.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kGap = 3;  // elements between rows, which no product may touch

View view(const Values& values, int64_t rows, int64_t columns) {
  return {const_cast<void*>(values.data()), DType::kBF16, rows, columns, columns + kGap};
}
Values with_gaps(int64_t rows, int64_t columns, uint32_t seed) {
  return Values::random(DType::kBF16, rows * (columns + kGap), seed);
}

enum class Product { kForward, kInputGradient, kWeightGradient };

// Of `rows` rows with a matrix [out, in].
struct Case {
  Product product;
  int64_t rows = 0, out = 0, in = 0;
  bool adds = false;
  std::array<int64_t, 2> of_a() const {
    return product == Product::kForward ? std::array{rows, in} : std::array{rows, out};
  }
  std::array<int64_t, 2> of_b() const {
    return product == Product::kWeightGradient ? std::array{rows, in} : std::array{out, in};
  }
  std::array<int64_t, 2> of_result() const {
    if (product == Product::kForward) return {rows, out};
    return {product == Product::kInputGradient ? rows : out, in};
  }
  int64_t inner() const {
    return product == Product::kForward ? in : product == Product::kInputGradient ? out : rows;
  }
  std::string text() const {
    return std::to_string(static_cast<int>(product)) + ": " + std::to_string(rows) + " x " +
           std::to_string(out) + " x " + std::to_string(in) + (adds ? " added" : "");
  }
};

// Rows of the few are the same in every case: its first ones are those of a case with more.
struct Operands {
  explicit Operands(const Case& c)
      : a(with_gaps(c.of_a()[0], c.of_a()[1], 41)),
        b(with_gaps(c.of_b()[0], c.of_b()[1], 42)),
        before(with_gaps(c.of_result()[0], c.of_result()[1], 43)) {}
  Gemm gemm(const Case& c, const Values& out) const {
    const View to = view(out, c.of_result()[0], c.of_result()[1]);
    return {.a = view(a, c.of_a()[0], c.of_a()[1]),
            .b = view(b, c.of_b()[0], c.of_b()[1]),
            .out = to,
            .addend = c.adds ? to : View{},
            .transpose_a = c.product == Product::kWeightGradient,
            .transpose_b = c.product == Product::kForward,
            .scale = 0.75F,
            .addend_scale = c.adds ? -1.5F : 1};
  }
  Values run(const Case& c, int threads) const {
    Values out = before;
    gemm_few_rows(gemm(c, out), threads);
    return out;
  }
  Values a, b, before;
};

std::vector<double> bits_of(const Values& values) {
  std::vector<double> out;
  for (int64_t i = 0; i < values.size(); ++i) out.push_back(values[i]);
  return out;
}

std::vector<Case> cases() {
  std::vector<Case> out;
  int64_t turn = 0;
  for (const Product product : {Product::kForward, Product::kInputGradient, Product::kWeightGradient})
    for (const int64_t rows : {16, 32, 45, 64})
      for (const auto& [outputs, inputs] :
           std::vector<std::array<int64_t, 2>>{{128, 128}, {150, 160}, {334, 224}, {130, 1056}})
        out.push_back({product, rows, outputs, inputs, ++turn % 2 == 0});
  return out;
}

class GemmFewRows : public ::testing::Test {
 protected:
  void SetUp() override {
    if (best_instructions() != Instructions::kAvx512Bf16) GTEST_SKIP() << "not on this processor";
  }
};

TEST_F(GemmFewRows, AreTheProductInAnyNumberOfThreads) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.text());
    const Operands of(c);
    ASSERT_TRUE(multiplies_few_rows(of.gemm(c, of.before)));
    const Values got = of.run(c, 1);
    for (const int threads : {2, 5}) EXPECT_EQ(bits_of(of.run(c, threads)), bits_of(got)) << threads;
    const auto [rows, columns] = c.of_result();
    std::vector<double> want;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < columns + kGap; ++j) {
        const double before = of.before[r * (columns + kGap) + j];
        if (j >= columns) {
          want.push_back(before);
          continue;
        }
        double sum = 0;
        for (int64_t k = 0; k < c.inner(); ++k) {
          const double a = c.product == Product::kWeightGradient ? of.a[k * (c.out + kGap) + r]
                                                                 : of.a[r * (c.of_a()[1] + kGap) + k];
          sum += a *
                 (c.product == Product::kForward ? of.b[j * (c.in + kGap) + k] : of.b[k * (c.in + kGap) + j]);
        }
        want.push_back(0.75 * sum + (c.adds ? -1.5 * before : 0));
      }
    }
    expect_near(got, want, 1.0 / 256, 2e-4, "product");
  }
}

// What a token has does not depend on how many there are beside it.
TEST_F(GemmFewRows, HaveTheBitsOfFewer) {
  for (const Product product : {Product::kForward, Product::kInputGradient}) {
    const Case many{product, 64, 150, 160}, few{product, 17, 150, 160};
    const Values of_many = Operands(many).run(many, 2), of_few = Operands(few).run(few, 2);
    const int64_t columns = few.of_result()[1];
    for (int64_t r = 0; r < few.rows; ++r)
      for (int64_t j = 0; j < columns; ++j)
        EXPECT_EQ(of_few[r * (columns + kGap) + j], of_many[r * (columns + kGap) + j]) << r << ", " << j;
  }
}

// Other shapes, types and processors are the library's.
TEST(GemmFewRowsShapes, AreChosen) {
  const auto takes = [](const Case& c, const std::function<void(Gemm&)>& change) {
    const Operands of(c);
    Gemm g = of.gemm(c, of.before);
    change(g);
    return multiplies_few_rows(g);
  };
  const auto nothing = [](Gemm&) {};
  const bool here = best_instructions() == Instructions::kAvx512Bf16;
  const Case plain{Product::kForward, 32, 128, 128};
  EXPECT_EQ(takes(plain, nothing), here);
  for (const Case& other :
       {Case{Product::kForward, 15, 128, 128}, Case{Product::kForward, 65, 128, 128},
        Case{Product::kForward, 32, 127, 128}, Case{Product::kForward, 32, 128, 129},
        Case{Product::kForward, 32, 128, 126}, Case{Product::kInputGradient, 32, 129, 128},
        Case{Product::kInputGradient, 32, 128, 144}, Case{Product::kWeightGradient, 32, 128, 144},
        Case{Product::kWeightGradient, 32, 126, 128}})
    EXPECT_FALSE(takes(other, nothing)) << other.text();
  EXPECT_FALSE(takes(plain, [](Gemm& g) { g.a.dtype = g.b.dtype = DType::kF16; }));
  EXPECT_FALSE(takes(plain, [](Gemm& g) { g.out.dtype = DType::kF32; }));
  EXPECT_FALSE(takes(plain, [](Gemm& g) { g.transpose_a = true; }));
}

}  // namespace
}  // namespace lm
