// Softmax cross-entropy over vocabulary segments against fp64 over the whole vocabulary, with and without a
// weight per row, a scale and a cap of the logits.
#include <array>
#include <numeric>

#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Problem {
  int64_t rows, vocabulary, segment;
  Values logits;
  std::vector<int32_t> target;
  std::vector<float> weight = {};  // empty: none
  float logit_scale = 1, cap = 0;
  const float* weights() const { return weight.empty() ? nullptr : weight.data(); }
  double weight_of(int64_t r) const { return weight.empty() ? 1 : weight[static_cast<size_t>(r)]; }
};

Problem make_problem(DType dtype, int64_t rows, int64_t vocabulary, int64_t segment, double scale) {
  Problem p{rows, vocabulary, segment, Values::random(dtype, rows * vocabulary, 11, scale), {}};
  for (int64_t r = 0; r < rows; ++r) p.target.push_back(static_cast<int32_t>(r * 37 % vocabulary));
  return p;
}

// Scale and cap, statistics over the segments in order, then the loss, then the gradient in place: {gradient,
// loss and correct rows, each row's max, target's logit and nll, the capped logits, each row's correct}.
Outputs run(const Problem& p, float scale) {
  return same_everywhere(
      [&](const Kernels& k, StreamView stream) {
        Values logits = p.logits, max(DType::kF32, p.rows), sum(DType::kF32, p.rows),
               chosen(DType::kF32, p.rows), nll(DType::kF32, p.rows), correct(DType::kF32, p.rows);
        float* m = static_cast<float*>(max.data());
        float* s = static_cast<float*>(sum.data());
        float* c = static_cast<float*>(chosen.data());
        const auto at = [&](int64_t column) {
          return static_cast<char*>(logits.data()) +
                 column * static_cast<int64_t>(dtype_size(p.logits.dtype()));
        };
        for (int64_t first = 0; first < p.vocabulary; first += p.segment) {
          if (p.logit_scale == 1 && p.cap == 0) break;
          k.cap_logits({.logits = at(first),
                        .rows = p.rows,
                        .columns = std::min(p.segment, p.vocabulary - first),
                        .stride = p.vocabulary,
                        .scale = p.logit_scale,
                        .cap = p.cap,
                        .dtype = p.logits.dtype()},
                       stream);
        }
        const Values capped = logits;
        for (int64_t first = 0; first < p.vocabulary; first += p.segment) {
          k.softmax_statistics({.logits = at(first),
                                .target = p.target.data(),
                                .max = m,
                                .sum = s,
                                .target_logit = c,
                                .correct = static_cast<float*>(correct.data()),
                                .rows = p.rows,
                                .columns = std::min(p.segment, p.vocabulary - first),
                                .stride = p.vocabulary,
                                .first_column = first,
                                .first_segment = first == 0,
                                .dtype = p.logits.dtype()},
                               stream);
        }
        double total = 1, correct_total = 2;
        k.softmax_loss({.max = m,
                        .sum = s,
                        .target_logit = c,
                        .weight = p.weights(),
                        .correct = static_cast<float*>(correct.data()),
                        .nll = static_cast<float*>(nll.data()),
                        .total = &total,
                        .correct_total = &correct_total,
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
                              .logit_scale = p.logit_scale,
                              .logit_cap = p.cap,
                              .dtype = p.logits.dtype()},
                             stream);
        }
        Values loss(DType::kF32, 2);
        loss.set(0, total - 1), loss.set(1, correct_total - 2);
        return Outputs{logits, loss, max, chosen, nll, capped, correct};
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

double capped(double logit, double scale, double cap) {
  return cap > 0 ? cap * std::tanh(scale * logit / cap) : scale * logit;
}

// The loss of the differences is written from its definition: the logarithm of one probability, of logits
// that are scaled and capped.
void expect_differences(float logit_scale, float cap) {
  SCOPED_TRACE("logits * " + std::to_string(logit_scale) + ", cap " + std::to_string(cap));
  const int64_t rows = 6, vocabulary = 37;
  const double scale = 0.375, h = 1e-5;
  Problem p = make_problem(DType::kF32, rows, vocabulary, 16, 2);
  p.logit_scale = logit_scale, p.cap = cap;
  const auto loss = [&](int64_t changed, double by) {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const auto power = [&](int64_t j) {
        const int64_t i = r * vocabulary + j;
        return std::exp(capped(p.logits[i] + (i == changed ? by : 0), p.logit_scale, p.cap));
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
  expect_near(got[0], want, 1e-5, cap > 0 ? 3e-7 : 1e-7, "gradient");
  EXPECT_NEAR(got[1][0] * scale, loss(-1, 0), 1e-5);
}

TEST(Softmax, GradientAgreesWithFiniteDifferences) {
  expect_differences(1, 0);
}

TEST(Softmax, GradientOfScaledAndCappedLogitsAgreesWithFiniteDifferences) {
  expect_differences(0.0625F, 0);
  expect_differences(1, 30);
  expect_differences(1.5F, 5);
}

// Few different logits, so that most rows have several largest ones; targets left and right of the first of
// them, and in other segments.
TEST(Softmax, ATargetIsCorrectIfItIsTheFirstOfTheLargestLogits) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [vocabulary, segment] :
         {std::array<int64_t, 2>{1, 1}, {3, 2}, {40, 16}, {40, 40}, {577, 64}, {577, 577}}) {
      SCOPED_TRACE(dtype_text(dtype) + " vocabulary " + std::to_string(vocabulary));
      const int64_t rows = 6 * vocabulary;
      Problem p{rows, vocabulary, segment, Values(dtype, rows * vocabulary), {}};
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t kinds = vocabulary / 4 + 2, target = r % vocabulary;
        int64_t largest = 0;
        for (int64_t j = 0; j < vocabulary; ++j) {
          p.logits.set(r * vocabulary + j, static_cast<double>((r * 131 + j * j * 7 + j * r) % kinds) - 3);
          if (j == target && r % 2 == 0) p.logits.set(r * vocabulary + j, static_cast<double>(kinds) - 4);
          if (p.logits[r * vocabulary + j] > p.logits[r * vocabulary + largest]) largest = j;
        }
        p.target.push_back(static_cast<int32_t>(target));
        p.weight.push_back(static_cast<float>(r % 3));
        want.push_back(largest == target ? 1 : 0);
      }
      const Outputs got = run(p, 1);
      expect_near(got[6], want, 0, 0, "correct");
      EXPECT_EQ(got[1][1], std::accumulate(want.begin(), want.end(), 0.0));
      if (vocabulary > 3) {
        EXPECT_GT(got[1][1], static_cast<double>(rows) / 40);
        EXPECT_LT(got[1][1], static_cast<double>(rows) / 2);
      }
    }
  }
}

// From the capped logits as they are stored, in every row and segment, with weights.
TEST(Softmax, GradientOfCappedLogitsHasTheSlopeOfTheCap) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [vocabulary, segment] : {std::array<int64_t, 2>{3, 2}, {577, 64}, {577, 577}}) {
      SCOPED_TRACE(dtype_text(dtype) + " vocabulary " + std::to_string(vocabulary));
      const int64_t rows = 19;
      Problem p = make_problem(dtype, rows, vocabulary, segment, 6);
      p.logit_scale = 0.5F, p.cap = 4;
      for (int64_t r = 0; r < rows; ++r) p.weight.push_back(static_cast<float>(r % 4) * 0.7F);
      const Outputs got = run(p, 0.25F);
      const Values& z = got[5];
      std::vector<double> want, want_z;
      for (int64_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (int64_t j = 0; j < vocabulary; ++j) sum += std::exp(z[r * vocabulary + j]);
        for (int64_t j = 0; j < vocabulary; ++j) {
          const double logit = z[r * vocabulary + j], target = j == p.target[static_cast<size_t>(r)];
          want.push_back((std::exp(logit) / sum - target) * 0.25 * p.weight_of(r) * 0.5 *
                         (1 - logit * logit / 16));
          want_z.push_back(capped(p.logits[r * vocabulary + j], 0.5, 4));
        }
      }
      expect_near(z, want_z, relative_bound(dtype), 1e-6, "capped");
      expect_near(got[0], want, dtype == DType::kBF16 ? 1.0 / 128 : 2e-5, 1e-6, "gradient");
    }
  }
}

TEST(CapLogits, ScalesOrCapsTheColumnsOfEveryRow) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const float cap : {0.F, 2.F, 30.F}) {
      for (const int64_t columns : {1, 15, 16, 64, 65, 577}) {
        SCOPED_TRACE(dtype_text(dtype) + " cap " + std::to_string(cap) + " columns " +
                     std::to_string(columns));
        const int64_t rows = 67, stride = columns + 3;
        const float scale = 0.3F;
        Values x = Values::random(dtype, rows * stride, 12, 8);
        x.set(0, 1e4), x.set(stride, -INFINITY), x.set(2 * stride, INFINITY);
        const Outputs got = same_everywhere(
            [&](const Kernels& k, StreamView stream) {
              Values y = x;
              k.cap_logits({.logits = y.data(),
                            .rows = rows,
                            .columns = columns,
                            .stride = stride,
                            .scale = scale,
                            .cap = cap,
                            .dtype = dtype},
                           stream);
              return Outputs{y};
            },
            cap > 0 ? Bits::kExp : Bits::kSame);
        std::vector<double> want;
        for (int64_t i = 0; i < x.size(); ++i) {
          want.push_back(i % stride < columns ? capped(x[i], scale, cap) : x[i]);
          if (i % stride >= columns) {
            EXPECT_EQ(got[0][i], x[i]);
          }
        }
        expect_near(got[0], want, relative_bound(dtype), 1e-6, "logits");
        if (cap > 0) {
          EXPECT_EQ(got[0][stride], -cap);
        }
      }
    }
  }
}

// With a cap of 1 the logits become their tanh. Small ones keep their digits.
TEST(CapLogits, TanhIsWithinFourUnitsInTheLastPlace) {
  const int64_t n = 200000;
  Values x(DType::kF32, n);
  for (int64_t i = 0; i < n / 2; ++i) {
    const double part = static_cast<double>(i) / (n / 2.0);
    x.set(i, std::pow(10, -12 + 12 * part) * (i % 2 == 0 ? 1 : -1));
    x.set(n / 2 + i, -10 + 20 * part);
  }
  for (CpuLevel level : cpu_levels()) {
    Values y = x;
    cpu_kernels(level).cap_logits(
        {.logits = y.data(), .rows = 1, .columns = n, .stride = n, .cap = 1, .dtype = DType::kF32}, {});
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double exact = std::tanh(x[i]);
      if (exact == 0) continue;
      worst = std::max(worst, std::abs(y[i] - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
    }
    EXPECT_LT(worst, 4) << cpu_level_name(level);
    RecordProperty(cpu_level_name(level), std::to_string(worst));
    std::printf("tanh on %s: at most %.2f units in the last place\n", cpu_level_name(level), worst);
  }
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
  for (const float cap : {0.F, 30.F}) {
    Problem p = make_problem(DType::kF32, 3, 40, 16, 1);
    p.cap = cap;
    p.logits.set(40 + 35, std::nan(""));
    EXPECT_TRUE(std::isnan(run(p, 1)[1][0])) << "cap " << cap;
  }
}

}  // namespace
}  // namespace lm
