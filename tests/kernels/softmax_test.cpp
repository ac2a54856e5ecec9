// Softmax cross-entropy over vocabulary segments against fp64 over the whole vocabulary, with and without a
// weight per row.
#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Problem {
  int64_t rows, vocabulary, segment;
  Values logits;
  std::vector<int32_t> target;
  std::vector<float> weight = {};  // empty: none
  const float* weights() const { return weight.empty() ? nullptr : weight.data(); }
  double weight_of(int64_t r) const { return weight.empty() ? 1 : weight[static_cast<size_t>(r)]; }
};

Problem make_problem(DType dtype, int64_t rows, int64_t vocabulary, int64_t segment, double scale) {
  Problem p{rows, vocabulary, segment, Values::random(dtype, rows * vocabulary, 11, scale), {}};
  for (int64_t r = 0; r < rows; ++r) p.target.push_back(static_cast<int32_t>(r * 37 % vocabulary));
  return p;
}

// Statistics over the segments in order, then the loss, then the gradient in place: {gradient, loss, each
// row's max, target's logit and nll}.
Outputs run(const Problem& p, float scale) {
  return same_everywhere(
      [&](const Kernels& k, StreamView stream) {
        Values logits = p.logits, max(DType::kF32, p.rows), sum(DType::kF32, p.rows),
               chosen(DType::kF32, p.rows), nll(DType::kF32, p.rows);
        float* m = static_cast<float*>(max.data());
        float* s = static_cast<float*>(sum.data());
        float* c = static_cast<float*>(chosen.data());
        const auto at = [&](int64_t column) {
          return static_cast<char*>(logits.data()) +
                 column * static_cast<int64_t>(dtype_size(p.logits.dtype()));
        };
        for (int64_t first = 0; first < p.vocabulary; first += p.segment) {
          k.softmax_statistics({.logits = at(first),
                                .target = p.target.data(),
                                .max = m,
                                .sum = s,
                                .target_logit = c,
                                .rows = p.rows,
                                .columns = std::min(p.segment, p.vocabulary - first),
                                .stride = p.vocabulary,
                                .first_column = first,
                                .first_segment = first == 0,
                                .dtype = p.logits.dtype()},
                               stream);
        }
        double total = 1;
        k.softmax_loss({.max = m,
                        .sum = s,
                        .target_logit = c,
                        .weight = p.weights(),
                        .nll = static_cast<float*>(nll.data()),
                        .total = &total,
                        .rows = p.rows},
                       stream);
        for (int64_t first = 0; first < p.vocabulary; first += p.segment) {
          k.softmax_gradient({.logits = at(first),
                              .target = p.target.data(),
                              .max = m,
                              .sum = s,
                              .rows = p.rows,
                              .columns = std::min(p.segment, p.vocabulary - first),
                              .stride = p.vocabulary,
                              .first_column = first,
                              .scale = scale,
                              .weight = p.weights(),
                              .dtype = p.logits.dtype()},
                             stream);
        }
        Values loss(DType::kF32, 1);
        loss.set(0, total - 1);
        return Outputs{logits, loss, max, chosen, nll};
      },
      Bits::kExp);
}

void expect_whole_vocabulary(bool weighted) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [rows, vocabulary, segment] :
         {std::array<int64_t, 3>{1, 1, 1}, {7, 3, 2}, {9, 577, 577}, {67, 577, 64}, {9, 20000, 8192}}) {
      for (double spread : {1.0, 30.0}) {
        SCOPED_TRACE(dtype_text(dtype) + " vocabulary " + std::to_string(vocabulary));
        Problem p = make_problem(dtype, rows, vocabulary, segment, spread);
        if (weighted)
          for (int64_t r = 0; r < rows; ++r) p.weight.push_back(static_cast<float>(r % 4) * 0.7F);
        const float scale = 0.25f;
        const Outputs got = run(p, scale);
        std::vector<double> gradient, nll;
        double loss = 0;
        for (int64_t r = 0; r < rows; ++r) {
          double largest = -1e300, sum = 0;
          for (int64_t j = 0; j < vocabulary; ++j) largest = std::max(largest, p.logits[r * vocabulary + j]);
          for (int64_t j = 0; j < vocabulary; ++j) sum += std::exp(p.logits[r * vocabulary + j] - largest);
          const double lse = largest + std::log(sum);
          const int64_t target = p.target[static_cast<size_t>(r)];
          nll.push_back(lse - p.logits[r * vocabulary + target]);
          loss += p.weight_of(r) * nll.back();
          for (int64_t j = 0; j < vocabulary; ++j) {
            gradient.push_back((std::exp(p.logits[r * vocabulary + j] - lse) - (j == target ? 1 : 0)) *
                               scale * p.weight_of(r));
          }
        }
        // exp(x - lse): an error of 1e-5 in lse of 100 is relative in the gradient.
        expect_near(got[0], gradient, dtype == DType::kBF16 ? 1.0 / 128 : 2e-5, 1e-6, "gradient");
        EXPECT_NEAR(got[1][0], loss, 1e-6 * std::abs(loss) + 1e-5 * static_cast<double>(rows));
        expect_near(got[4], nll, 1e-6, 1e-5, "nll");
      }
    }
  }
}

TEST(Softmax, LossAndGradientAreThoseOfTheWholeVocabulary) {
  expect_whole_vocabulary(false);
}

TEST(Softmax, AWeightPerRowReachesLossAndGradient) {
  expect_whole_vocabulary(true);
}

TEST(Softmax, WeightsOfOneGiveTheBitsOfNone) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Problem p = make_problem(dtype, 67, 577, 64, 4);
    const Outputs none = run(p, 0.25F);
    p.weight.assign(67, 1.F);
    const Outputs ones = run(p, 0.25F);
    for (size_t i = 0; i < none.size(); ++i) EXPECT_TRUE(ones[i] == none[i]) << "output " << i;
  }
}

// The loss of the differences is written from its definition: the logarithm of one probability.
TEST(Softmax, GradientAgreesWithFiniteDifferences) {
  const int64_t rows = 6, vocabulary = 37;
  const double scale = 0.375, h = 1e-5;
  const Problem p = make_problem(DType::kF32, rows, vocabulary, 16, 2);
  const auto loss = [&](int64_t changed, double by) {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const auto power = [&](int64_t j) {
        const int64_t i = r * vocabulary + j;
        return std::exp(p.logits[i] + (i == changed ? by : 0));
      };
      double all = 0;
      for (int64_t j = 0; j < vocabulary; ++j) all += power(j);
      sum -= std::log(power(p.target[static_cast<size_t>(r)]) / all);
    }
    return sum * scale;
  };
  const Outputs got = run(p, static_cast<float>(scale));
  std::vector<double> want;
  for (int64_t i = 0; i < p.logits.size(); ++i) want.push_back((loss(i, h) - loss(i, -h)) / (2 * h));
  expect_near(got[0], want, 1e-5, 1e-7, "gradient");
  EXPECT_NEAR(got[1][0] * scale, loss(-1, 0), 1e-5);
}

TEST(Softmax, ExpIsWithinTwoUnitsInTheLastPlace) {
  // With lse = 0 and no target in the segment the gradient is exp itself.
  const int64_t n = 200000;
  Values x(DType::kF32, n);
  for (int64_t i = 0; i < n; ++i) x.set(i, -87.3 + 175.3 * static_cast<double>(i) / static_cast<double>(n));
  const int32_t target = -1;
  const float max = 0, sum = 1;
  for (CpuLevel level : cpu_levels()) {
    Values y = x;
    cpu_kernels(level).softmax_gradient({.logits = y.data(),
                                         .target = &target,
                                         .max = &max,
                                         .sum = &sum,
                                         .rows = 1,
                                         .columns = n,
                                         .stride = n,
                                         .dtype = DType::kF32},
                                        {});
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double exact = std::exp(x[i]);
      worst = std::max(worst, std::abs(y[i] - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
    }
    EXPECT_LT(worst, 2) << cpu_level_name(level);
    RecordProperty(cpu_level_name(level), std::to_string(worst));
    std::printf("exp on %s: at most %.2f units in the last place\n", cpu_level_name(level), worst);
  }
}

TEST(Softmax, ANanLogitReachesTheLoss) {
  Problem p = make_problem(DType::kF32, 3, 40, 16, 1);
  p.logits.set(40 + 35, std::nan(""));
  EXPECT_TRUE(std::isnan(run(p, 1)[1][0]));
}

}  // namespace
}  // namespace lm
