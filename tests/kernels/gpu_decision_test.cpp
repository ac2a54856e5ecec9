// A step's check on the GPU: the CPU's bits, in whatever order of magnitude the norms are, and updates that
// read it.
#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

constexpr int64_t kGranule = 4096;
// Blocks: none is trained of the second one. The last has more norms than are fetched at a time.
const std::vector<int64_t> kFirst = {0, 3, 3, 1500, 4200};
constexpr int64_t kArrays = 3;
constexpr int64_t kArrayFirst[kArrays] = {0, 3, 4190};  // of those whose elements are looked at

template <class T>
Array bytes_of(const std::vector<T>& list) {
  Array a = zeros(DType::kF32, std::ssize(list) * static_cast<int64_t>(sizeof(T)) / 4);
  std::memcpy(a.values.data(), list.data(), list.size() * sizeof(T));
  return a;
}

struct Case {
  DType dtype = DType::kF32;
  std::vector<double> sums;
  double nll = 12.5, loss_scale = 1;
  std::vector<std::pair<int64_t, double>> bad = {};  // elements of the last array, and their values
};

// Added in another order they have another sum.
std::vector<double> norms() {
  std::mt19937 random(3);
  std::vector<double> out(static_cast<size_t>(kFirst.back()));
  for (double& x : out)
    x = std::ldexp(static_cast<double>(random() % 1000 + 1), static_cast<int>(random() % 60));
  return out;
}

void check_decision(const Case& c) {
  Array gradient = noise(c.dtype, 10 * kGranule, 1);
  for (const auto& [at, value] : c.bad) gradient.values.set(at, value);
  const Array losses = bytes_of(std::vector<double>{c.nll, 7});
  check(
      {bytes_of(c.sums), bytes_of(kFirst), zeros(DType::kF32, 2 * (std::ssize(kFirst) - 1)),
       zeros(DType::kF32, kArrays * 4), gradient, losses, zeros(DType::kF32, sizeof(StepDecision) / 4),
       bytes_of(std::vector<double>{2.5, 3, 0.25, 0.75})},
      [&](const Kernels& k, StreamView s, const Pointers& p) {
        // In memory that outlives the copy. The first two arrays have no element that is looked at.
        static std::vector<GradientArray> arrays(kArrays);
        for (int64_t i = 0; i < kArrays; ++i) arrays[static_cast<size_t>(i)] = {p[4], kArrayFirst[i]};
        copy_bytes(p[3], arrays.data(), kArrays * 16, s);
        const auto* const loss = static_cast<const double*>(p[5]);
        k.decide({.sums = static_cast<const double*>(p[0]),
                  .first_granule = static_cast<const int64_t*>(p[1]),
                  .squares = static_cast<double*>(p[2]),
                  .blocks = std::ssize(kFirst) - 1,
                  .arrays = static_cast<const GradientArray*>(p[3]),
                  .array_count = kArrays,
                  .nll = loss,
                  .correct = loss + 1,
                  .routers = static_cast<const RouterFigures*>(p[7]),
                  .divisor = 3,
                  .loss_scale = c.loss_scale,
                  .max_grad_norm = 0.5,
                  .out = static_cast<StepDecision*>(p[6]),
                  .gradient_dtype = c.dtype},
                 s);
        zero_bytes(p[3], kArrays * 16, s);  // addresses differ
      },
      Want::kBits);
}

TEST_F(GpuKernels, Decide) {
  const auto last = static_cast<size_t>(kFirst.back() - 3);  // the eighth granule of the last array
  for (DType dtype : kBoth) {
    SCOPED_TRACE(dtype_name(dtype));
    Case c{.dtype = dtype, .sums = norms()};
    check_decision(c);
    c.loss_scale = 1024;
    check_decision(c);
    c.nll = kInf;  // no gradient is at fault
    check_decision(c);
    c.nll = kNotANumber;
    check_decision(c);
    c.nll = 1;
    c.sums[5] = kNotANumber;  // an earlier one
    c.sums[last] = kInf;
    c.bad = {{7 * kGranule + 11, kInf}, {7 * kGranule + 4000, kNotANumber}, {3, kInf}};
    check_decision(c);
    c.bad = {{7 * kGranule, -kInf}};
    check_decision(c);
    c.bad = {};  // another rank's
    check_decision(c);
  }
}

// What the fields say, and not only that both devices say it.
TEST(Decide, NormClippingAndFault) {
  const std::vector<double> sums = {4, 0, 5, 16};
  const std::vector<int64_t> first = {0, 1, 4};
  std::vector<float> gradient(4 * kGranule, 1);
  const GradientArray arrays[] = {{gradient.data(), 0}, {gradient.data() + kGranule, 1}};
  std::vector<double> all = sums;
  double squares[2];
  const double nll = 6, correct = 2;
  StepDecision out;
  const auto decide = [&](double loss_scale) {
    kernels(DeviceType::kCpu)
        .decide({.sums = all.data(),
                 .first_granule = first.data(),
                 .squares = squares,
                 .blocks = 2,
                 .arrays = arrays,
                 .array_count = 2,
                 .nll = &nll,
                 .correct = &correct,
                 .divisor = 4,
                 .loss_scale = loss_scale,
                 .max_grad_norm = 1,
                 .out = &out},
                StreamView{});
  };
  decide(1);
  EXPECT_EQ(out.loss, 1.5);
  EXPECT_EQ(out.correct, 2);
  EXPECT_EQ(out.grad_norm, 5);
  EXPECT_EQ(out.skipped, 0);
  EXPECT_EQ(out.granule, -1);
  EXPECT_EQ(out.scale, static_cast<float>(1 / (5 + 1e-6)));
  decide(8);
  EXPECT_EQ(out.grad_norm, 0.625);
  EXPECT_EQ(out.scale, 0.125F);
  gradient[2 * kGranule + 9] = static_cast<float>(kNotANumber);
  gradient[2 * kGranule + 5] = static_cast<float>(kInf);
  all[0] = all[2] = kInf;
  decide(1);
  EXPECT_EQ(out.skipped, 1);
  EXPECT_EQ(out.granule, 2);
  EXPECT_EQ(out.element, 9);
  EXPECT_EQ(out.is_nan, 1);
}

// With a decision: its factor replaces the host's, and a skipped step's update changes nothing.
TEST_F(GpuKernels, UpdatesReadTheDecision) {
  const RuleScalars rule = AdamW{.one_minus_beta1 = 0.1f,
                                 .beta2 = 0.999f,
                                 .one_minus_beta2 = 0.001f,
                                 .step_size = 1e-3f,
                                 .rsqrt_correction2 = 1.5f,
                                 .eps = 1e-8f,
                                 .decay = 0.99999f};
  constexpr int64_t kElements = 1028;
  for (const int32_t skipped : {0, 1}) {
    SCOPED_TRACE(skipped);
    StepDecision decision;
    decision.scale = 0.3F, decision.skipped = skipped;
    const Array decided = bytes_of(std::vector<StepDecision>{decision});
    check(
        {noise(DType::kF32, kElements, 1), noise(DType::kBF16, kElements, 2),
         noise(DType::kBF16, kElements, 3), noise(DType::kF32, kElements, 4, 0.1),
         Array{Values(DType::kF32, kElements)}, decided},
        [&](const Kernels& k, StreamView s, const Pointers& p) {
          const bool gpu = s.device == DeviceType::kCuda;
          if (!gpu && skipped != 0) return;
          k.update({.rule = rule,
                    .gradient = p[0],
                    .weight = p[1],
                    .master = p[2],
                    .state = {p[3], p[4]},
                    .elements = kElements,
                    .weight_dtype = DType::kBF16,
                    .form = MasterForm::kSplit,
                    .gradient_scale = gpu ? 1.F : 0.3F,
                    .decision = gpu ? static_cast<const StepDecision*>(p[5]) : nullptr},
                   s);
        },
        Want::kBits);
  }
}

}  // namespace
}  // namespace lm
