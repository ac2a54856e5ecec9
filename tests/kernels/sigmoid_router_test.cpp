// Routing by sigmoid scores: who is chosen with corrections and groups, with which weights, and the gradients
// against finite differences in fp64.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Case {
  int64_t tokens = 0, experts = 0, chosen = 0;
  bool renormalise = false;
  int64_t groups = 1, kept = 1;
  float scale = 1;
};

const Case kCases[] = {{1, 4, 2, true},        {70, 9, 3, false, 1, 1, 2.5F},   {33, 60, 4, true, 6, 2, 1.5F},
                       {70, 8, 3, true, 4, 2}, {301, 256, 8, true, 8, 4, 2.5F}, {9, 5, 5, true}};

std::vector<double> row_of(const Values& x, int64_t row, int64_t columns) {
  std::vector<double> out;
  for (int64_t j = 0; j < columns; ++j) out.push_back(x[row * columns + j]);
  return out;
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// The `count` largest in descending order, of equal ones the first.
std::vector<int64_t> largest(const std::vector<double>& of, int64_t count) {
  std::vector<int64_t> order(of.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](int64_t a, int64_t b) { return of[static_cast<size_t>(a)] > of[static_cast<size_t>(b)]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

std::vector<int64_t> chosen_of(const Case& c, const std::vector<double>& logits, const Values& correction) {
  std::vector<double> choice;
  for (size_t e = 0; e < logits.size(); ++e)
    choice.push_back(sigmoid(logits[e]) + correction[static_cast<int64_t>(e)]);
  const int64_t each = c.experts / c.groups;
  std::vector<double> of_group;
  for (int64_t g = 0; g < c.groups && c.groups > 1; ++g) {
    std::vector<double> group(choice.begin() + g * each, choice.begin() + (g + 1) * each);
    std::ranges::sort(group, std::greater<>());
    of_group.push_back(group[0] + group[1]);
  }
  if (c.groups > 1) {
    const std::vector<int64_t> kept = largest(of_group, c.kept);
    for (int64_t e = 0; e < c.experts; ++e)
      if (std::ranges::find(kept, e / each) == kept.end()) choice[static_cast<size_t>(e)] = -1e9;
  }
  return largest(choice, c.chosen);
}

std::vector<double> weights_of(const Case& c, const std::vector<double>& logits,
                               const std::vector<int64_t>& chosen) {
  std::vector<double> out;
  double sum = c.renormalise ? 0 : 1;
  for (const int64_t e : chosen) {
    out.push_back(sigmoid(logits[static_cast<size_t>(e)]));
    if (c.renormalise) sum += out.back();
  }
  for (double& weight : out) weight *= double{c.scale} / sum;
  return out;
}

// Corrections that change choices, some of them below 0.
Values corrections(const Case& c) {
  return Values::random(DType::kF32, c.experts, 12, 0.3);
}

// Memory for a routing, and that as the kernels take it.
struct Routed {
  explicit Routed(const Case& c)
      : expert(static_cast<size_t>(c.tokens * c.chosen)),
        row(expert.size()),
        slot(expert.size()),
        token(expert.size()),
        start(static_cast<size_t>(c.experts) + 1),
        weight(expert.size()),
        score(static_cast<size_t>(c.tokens * c.experts)) {}
  Routing view() {
    return {expert.data(), weight.data(), row.data(), slot.data(), token.data(), start.data()};
  }
  std::vector<int32_t> expert, row, slot, token, start;
  std::vector<float> weight, score;
};

RouteScores scores_of(const Case& c, const Values& correction) {
  return {.sigmoid = true,
          .correction = static_cast<const float*>(correction.data()),
          .groups = c.groups,
          .kept_groups = c.kept,
          .scale = c.scale};
}

Routed routed(const Kernels& k, StreamView stream, const Case& c, const Values& logits,
              const Values& correction) {
  Routed out(c);
  Values copy = logits;
  k.route_tokens({.logits = view_of(copy.data(), logits.dtype(), c.tokens, c.experts),
                  .probability = out.score.data(),
                  .routing = out.view(),
                  .tokens = c.tokens,
                  .chosen = c.chosen,
                  .renormalise = c.renormalise,
                  .scores = scores_of(c, correction)},
                 stream);
  return out;
}

template <class T>
Values values_of(const std::vector<T>& x) {
  Values out(DType::kF32, std::ssize(x));
  for (int64_t i = 0; i < out.size(); ++i) out.set(i, static_cast<double>(x[static_cast<size_t>(i)]));
  return out;
}

TEST(SigmoidRouter, ChoosesByCorrectedScoresAndWeighsByTheScoresAlone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(dtype_text(dtype) + ", experts " + std::to_string(c.experts));
      const Values logits = Values::random(dtype, c.tokens * c.experts, 3, 2), correction = corrections(c);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            const Routed r = routed(k, stream, c, logits, correction);
            return Outputs{values_of(r.weight), values_of(r.score), values_of(r.expert)};
          },
          Bits::kExp);
      std::vector<double> weight, score, expert;
      int64_t uncorrected = 0;  // choices that the corrections have changed
      for (int64_t t = 0; t < c.tokens; ++t) {
        const std::vector<double> row = row_of(logits, t, c.experts);
        const std::vector<int64_t> chosen = chosen_of(c, row, correction);
        uncorrected += chosen != chosen_of(c, row, Values(DType::kF32, c.experts));
        expert.insert(expert.end(), chosen.begin(), chosen.end());
        for (const double logit : row) score.push_back(sigmoid(logit));
        for (const double w : weights_of(c, row, chosen)) weight.push_back(w);
      }
      EXPECT_TRUE(uncorrected > 0 || c.tokens == 1);
      expect_near(got[2], expert, 0, 0, "expert");
      expect_near(got[1], score, 2e-6, 1e-30, "score");
      expect_near(got[0], weight, 3e-6, 1e-7, "weight");
    }
  }
}

TEST(SigmoidRouter, ScoresThatAreAllNothingLeaveNoWeight) {
  const Case c{2, 4, 2, true};
  Values logits(DType::kF32, c.tokens * c.experts);
  for (int64_t i = 0; i < logits.size(); ++i) logits.set(i, i < c.experts ? -1e4 : NAN);
  const Routed r =
      routed(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, c, logits, Values(DType::kF32, 4));
  EXPECT_EQ(r.expert, (std::vector<int32_t>{0, 1, 0, 1}));
  EXPECT_LT(r.weight[0] + r.weight[1], 1e-6F);
  EXPECT_TRUE(std::isnan(r.weight[2])) << "the loss says that something is wrong";
}

// d/dlogit of sum over the slots of weight * g, by central differences with the choice held.
double difference(const Case& c, const std::vector<double>& logits, size_t of,
                  const std::vector<int64_t>& chosen, const std::vector<double>& g) {
  constexpr double kStep = 1e-5;
  double out = 0;
  for (const double side : {1.0, -1.0}) {
    std::vector<double> moved = logits;
    moved[of] += side * kStep;
    const std::vector<double> weights = weights_of(c, moved, chosen);
    for (size_t j = 0; j < weights.size(); ++j) out += side * weights[j] * g[j];
  }
  return out / (2 * kStep);
}

TEST(SigmoidRouter, TheGradientOfLogitsIsThatOfFiniteDifferences) {
  for (const Case& c : kCases) {
    SCOPED_TRACE("experts " + std::to_string(c.experts));
    constexpr int64_t kSurplus = 3;
    const Values logits = Values::random(DType::kF32, c.tokens * c.experts, 5, 1.5),
                 g = Values::random(DType::kF32, c.tokens * c.chosen, 6), correction = corrections(c);
    const Outputs got = same_everywhere(
        [&](const Kernels& k, StreamView stream) {
          Routed r = routed(k, stream, c, logits, correction);
          Values copy = g, out = Values::random(DType::kF32, (c.tokens + kSurplus) * c.experts, 7);
          k.route_backward({.probability = r.score.data(),
                            .routing = r.view(),
                            .dweight = static_cast<const float*>(copy.data()),
                            .dlogits = view_of(out.data(), DType::kF32, c.tokens + kSurplus, c.experts),
                            .tokens = c.tokens,
                            .chosen = c.chosen,
                            .renormalise = c.renormalise,
                            .scores = scores_of(c, correction)},
                           stream);
          return Outputs{out};
        },
        Bits::kExp);
    std::vector<double> want;
    for (int64_t t = 0; t < c.tokens; ++t) {
      const std::vector<double> row = row_of(logits, t, c.experts), of_token = row_of(g, t, c.chosen);
      const std::vector<int64_t> chosen = chosen_of(c, row, correction);
      for (size_t e = 0; e < row.size(); ++e) want.push_back(difference(c, row, e, chosen, of_token));
    }
    want.resize(static_cast<size_t>(got[0].size()), 0);  // rows behind the tokens
    expect_near(got[0], want, 1e-5, 4e-6, "dlogits");
  }
}

TEST(SigmoidRouter, FiguresAreOfScoresOverTheirSum) {
  constexpr int64_t kTokens = 5, kExperts = 3, kChosen = 1;
  std::vector<float> scores;
  for (int64_t i = 0; i < kTokens * kExperts; ++i) scores.push_back(0.1F * static_cast<float>(i % 4 + 1));
  const std::vector<int32_t> expert = {0, 1, 2, 1, 1};
  std::vector<double> chosen(kExperts), probability(kExperts), entropy(1);
  kernels(DeviceType::kCpu)
      .count_routes({.probability = view_of(scores.data(), DType::kF32, kTokens, kExperts),
                     .expert = expert.data(),
                     .chosen = kChosen,
                     .sums = {chosen.data(), probability.data(), entropy.data()},
                     .scores = true},
                    {DeviceType::kCpu, nullptr, 1});
  std::vector<double> want(kExperts);
  double of_all = 0;
  for (size_t t = 0; t < kTokens; ++t) {
    double sum = 0;
    for (size_t e = 0; e < kExperts; ++e) sum += double{scores[t * kExperts + e]};
    for (size_t e = 0; e < kExperts; ++e) {
      const double share = double{scores[t * kExperts + e]} / sum;
      want[e] += share;
      of_all -= share * std::log(share);
    }
  }
  EXPECT_EQ(chosen, (std::vector<double>{1, 3, 1}));
  for (size_t e = 0; e < kExperts; ++e) EXPECT_NEAR(probability[e], want[e], 1e-6);
  EXPECT_NEAR(entropy[0], of_all, 1e-6);
}

}  // namespace
}  // namespace lm
