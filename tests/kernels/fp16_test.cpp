// fp16: conversions against the definition, products against fp64, and the forms of its masters.
#include "base/host_device.h"
#include "base/philox.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

// `from` in another type, by the kernel that adds gradients.
Values converted(const Kernels& k, StreamView stream, const Values& from, DType to) {
  Values out(to, from.size());
  k.accumulate({.to = out.data(),
                .from = from.data(),
                .elements = from.size(),
                .to_dtype = to,
                .from_dtype = from.dtype(),
                .overwrite = true},
               stream);
  return out;
}

// Every fp16 number, what lies midway between two, and what is next to that.
Values hard_numbers() {
  std::vector<float> all = {NAN, INFINITY, -INFINITY, 65519.F, 65520.F, 65536.F, -1e30F, 1e-42F, 0x1p-25F};
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const auto here = static_cast<float>(fp16_number(static_cast<uint16_t>(bits)));
    const auto middle =
        static_cast<float>((here + fp16_number(static_cast<uint16_t>(bits + (bits < 0x7BFF)))) / 2);
    for (const float x : {here, middle, std::nextafterf(middle, 0.F), std::nextafterf(middle, 1e30F)})
      all.insert(all.end(), {x, -x});
  }
  Values out(DType::kF32, std::ssize(all));
  for (int64_t i = 0; i < out.size(); ++i) out.set(i, all[static_cast<size_t>(i)]);
  return out;
}

TEST(Fp16, NumbersAreTheNearestOnEveryInstructionSet) {
  const Values numbers = hard_numbers();
  Values want(DType::kF16, numbers.size());
  for (int64_t i = 0; i < numbers.size(); ++i) {
    want.set(i, numbers[i]);
    ASSERT_EQ(to_fp16(static_cast<float>(numbers[i])).bits, fp16_bits(nearest_fp16(numbers[i])))
        << numbers[i];
  }
  const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
    const Values half = converted(k, stream, numbers, DType::kF16);
    return Outputs{half, converted(k, stream, half, DType::kF32)};
  });
  EXPECT_TRUE(got[0] == want);
  for (int64_t i = 0; i < numbers.size(); ++i) {
    if (std::isnan(want[i])) continue;
    ASSERT_EQ(got[1][i], want[i]) << numbers[i];
  }
}

TEST(Fp16, ProductsAreSummedInFp32) {
  constexpr int64_t kRows = 70, kColumns = 41, kInner = 300;
  for (int way = 0; way < 4; ++way) {
    const bool transpose_a = way & 1, transpose_b = way & 2;
    // Their sums are beyond what fp16 adds without loss.
    const Values a = Values::random(DType::kF16, kRows * kInner, 1, 8),
                 b = Values::random(DType::kF16, kColumns * kInner, 2, 8);
    const auto view = [](const Values& x, int64_t rows, int64_t columns) {
      return View{const_cast<void*>(x.data()), DType::kF16, rows, columns, columns};
    };
    const Outputs got = same_everywhere(
        [&](const Kernels& k, StreamView stream) {
          Values out(DType::kF16, kRows * kColumns);
          k.gemm({.a = transpose_a ? view(a, kInner, kRows) : view(a, kRows, kInner),
                  .b = transpose_b ? view(b, kColumns, kInner) : view(b, kInner, kColumns),
                  .out = view(out, kRows, kColumns),
                  .transpose_a = transpose_a,
                  .transpose_b = transpose_b},
                 stream);
          return Outputs{std::move(out)};
        },
        Bits::kExp);
    std::vector<double> want;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kColumns; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < kInner; ++i)
          sum += a[transpose_a ? i * kRows + r : r * kInner + i] *
                 b[transpose_b ? c * kInner + i : i * kColumns + c];
        want.push_back(sum);
      }
    }
    expect_near(got[0], want, 1.0 / 2048, 0.05, "product");
  }
}

struct Tensors {
  Values weight, master, m, v;
};

void adamw(const Kernels& k, StreamView stream, MasterForm form, Tensors& t, const Values& gradient) {
  k.update({.rule = AdamW::at({}, {.lr = 1e-2, .weight_decay = 0.1, .t = 3}),
            .gradient = gradient.data(),
            .weight = t.weight.data(),
            .master = has_master(form) ? t.master.data() : nullptr,
            .state = {static_cast<float*>(t.m.data()), static_cast<float*>(t.v.data())},
            .elements = gradient.size(),
            .gradient_dtype = gradient.dtype(),
            .weight_dtype = t.weight.dtype(),
            .form = form,
            .gradient_scale = 1.F / 1024,
            .rounding_key = philox_key(3, Purpose::kRounding, 7, 9)},
           stream);
}

Tensors tensors(DType weight, int64_t n) {
  Tensors out{Values(weight, n), Values::random(DType::kF32, n, 5, 0.05),
              Values::random(DType::kF32, n, 6, 0.1), Values::random(DType::kF32, n, 7, 0.01)};
  for (int64_t i = 0; i < n; ++i) out.weight.set(i, out.master[i]), out.v.set(i, std::abs(out.v[i]));
  return out;
}

// The master is the one of a bf16 weight, and the weight is rounded from it.
TEST(Fp16, AnFp32MasterIsTheSameOneAndRoundsToTheNearest) {
  const int64_t n = 64 * 300 + 5;
  const Values gradient = Values::random(DType::kF32, n, 3, 1000);
  Tensors bf16 = tensors(DType::kBF16, n);
  adamw(kernels(DeviceType::kCpu), {}, MasterForm::kF32, bf16, gradient);
  const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
    Tensors t = tensors(DType::kF16, n);
    adamw(k, stream, MasterForm::kF32OfFp16, t, gradient);
    return Outputs{t.weight, t.master, t.m, t.v};
  });
  EXPECT_TRUE(got[1] == bf16.master && got[2] == bf16.m && got[3] == bf16.v);
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(got[0][i], nearest_fp16(got[1][i])) << i;
}

// The two neighbours of a number, by chances that give the number on average, above 2^-14 and below.
TEST(Fp16, WithoutAMasterRoundingIsStochastic) {
  const int64_t n = 1 << 16;
  for (const double size : {0.7, 3e-5, 1e-7}) {
    Values start(DType::kF16, n), momentum(DType::kF32, n), gradient(DType::kF32, n);
    for (int64_t i = 0; i < n; ++i) start.set(i, size), gradient.set(i, size);
    const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
      Values weight = start, m = momentum;
      k.update({.rule = Sgd::at({.momentum = 0}, {.lr = 0.3, .t = 1}),
                .gradient = gradient.data(),
                .weight = weight.data(),
                .state = {static_cast<float*>(m.data())},
                .elements = n,
                .weight_dtype = DType::kF16,
                .form = MasterForm::kStochasticFp16,
                .rounding_key = philox_key(11, Purpose::kRounding, 1, 2)},
               stream);
      return Outputs{std::move(weight)};
    });
    const double exact = start[0] - double{0.3F} * gradient[0];
    int exponent = 0;
    std::frexp(exact, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent - 11, -24));
    double mean = 0;
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_LT(std::abs(got[0][i] - exact), unit) << i;
      mean += got[0][i] / static_cast<double>(n);
    }
    EXPECT_LE(std::abs(mean - exact), 3 * unit * std::sqrt(0.25 / static_cast<double>(n))) << size;
  }
}

}  // namespace
}  // namespace lm
