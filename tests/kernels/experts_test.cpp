// Routing of tokens to experts: who is chosen, how rows are sorted, and the gradients against finite
// differences in fp64.
#include <algorithm>
#include <numeric>

#include "base/batch.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Case {
  int64_t tokens = 0, experts = 0, chosen = 0;
  bool renormalise = false, pad = false;
  int64_t slots() const { return tokens * chosen; }
};

const Case kCases[] = {{1, 4, 2, true},          {70, 8, 3, false},   {70, 8, 3, true, true},
                       {33, 60, 4, false, true}, {301, 128, 8, true}, {9, 5, 5, false}};

// Memory for a routing, and that as the kernels take it.
struct Routed {
  explicit Routed(const Case& c)
      : expert(static_cast<size_t>(c.slots())),
        row(expert.size()),
        slot(static_cast<size_t>(routed_rows(c.slots(), c.experts, c.pad))),
        token(slot.size()),
        start(static_cast<size_t>(c.experts) + 1),
        weight(expert.size()),
        probability(static_cast<size_t>(c.tokens * c.experts)) {}
  Routing view() {
    return {expert.data(), weight.data(), row.data(), slot.data(), token.data(), start.data()};
  }
  std::vector<int32_t> expert, row, slot, token, start;
  std::vector<float> weight, probability;
};

Values values_of(const std::vector<float>& x) {
  Values out(DType::kF32, std::ssize(x));
  for (int64_t i = 0; i < out.size(); ++i) out.set(i, double{x[static_cast<size_t>(i)]});
  return out;
}
Values values_of(const std::vector<int32_t>& x) {
  Values out(DType::kF32, std::ssize(x));  // small enough to be exact
  for (int64_t i = 0; i < out.size(); ++i) out.set(i, x[static_cast<size_t>(i)]);
  return out;
}

Routed routed(const Kernels& k, StreamView stream, const Case& c, const Values& logits) {
  Routed out(c);
  Values copy = logits;
  k.route_tokens({.logits = view_of(copy.data(), logits.dtype(), c.tokens, c.experts),
                  .probability = out.probability.data(),
                  .routing = out.view(),
                  .tokens = c.tokens,
                  .chosen = c.chosen,
                  .renormalise = c.renormalise,
                  .round = true,
                  .pad = c.pad},
                 stream);
  return out;
}

// Of one token in fp64.
std::vector<double> softmax(const std::vector<double>& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> out;
  for (const double logit : logits) out.push_back(std::exp(logit - largest));
  const double sum = std::accumulate(out.begin(), out.end(), 0.0);
  for (double& p : out) p /= sum;
  return out;
}
std::vector<double> row_of(const Values& x, int64_t row, int64_t columns) {
  std::vector<double> out;
  for (int64_t j = 0; j < columns; ++j) out.push_back(x[row * columns + j]);
  return out;
}
// The experts with the largest logits; of equal ones the first.
std::vector<int32_t> largest(const std::vector<double>& logits, int64_t count) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(count));
  return order;
}
std::vector<double> weights_of(const std::vector<double>& logits, const std::vector<int32_t>& chosen,
                               bool renormalise) {
  const std::vector<double> p = softmax(logits);
  std::vector<double> out;
  for (const int32_t e : chosen) out.push_back(p[static_cast<size_t>(e)]);
  const double sum = renormalise ? std::accumulate(out.begin(), out.end(), 0.0) : 1;
  for (double& w : out) w /= sum;
  return out;
}

TEST(ExpertRouting, ChoosesTheLargestWithTheirWeights) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(dtype_text(dtype) + ", experts " + std::to_string(c.experts));
      const Values logits = Values::random(dtype, c.tokens * c.experts, 3, 2);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            const Routed r = routed(k, stream, c, logits);
            return Outputs{values_of(r.weight), values_of(r.probability), values_of(r.expert)};
          },
          Bits::kExp);
      std::vector<double> weight, probability, expert;
      for (int64_t t = 0; t < c.tokens; ++t) {
        const std::vector<double> row = row_of(logits, t, c.experts);
        const std::vector<int32_t> chosen = largest(row, c.chosen);
        expert.insert(expert.end(), chosen.begin(), chosen.end());
        for (const double p : softmax(row)) probability.push_back(p);
        for (const double w : weights_of(row, chosen, c.renormalise)) weight.push_back(w);
      }
      expect_near(got[2], expert, 0, 0, "expert");
      expect_near(got[1], probability, 2e-6, 1e-30, "probability");
      expect_near(got[0], weight,
                  dtype == DType::kBF16  ? 1.0 / 256
                  : dtype == DType::kF16 ? 1e-3
                                         : 3e-6,
                  1e-7, "weight");
    }
  }
}

TEST(ExpertRouting, SortsRowsByExpertInTheOrderOfTheTokens) {
  for (const Case& c : kCases) {
    SCOPED_TRACE("experts " + std::to_string(c.experts) + (c.pad ? ", padded" : ""));
    const Values logits = Values::random(DType::kF32, c.tokens * c.experts, 4, 2);
    const Routed r = routed(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 2}, c, logits);
    EXPECT_EQ(r.start.front(), 0);
    EXPECT_LE(r.start.back(), std::ssize(r.slot));
    if (!c.pad) {
      EXPECT_EQ(r.start.back(), c.slots());
    }
    int64_t used = 0;
    for (size_t e = 0; e + 1 < r.start.size(); ++e) {
      int32_t last = -1;
      int64_t mine = 0;
      for (auto at = static_cast<size_t>(r.start[e]); at < static_cast<size_t>(r.start[e + 1]); ++at) {
        const int32_t slot = r.slot[at];
        if (slot < 0) {
          EXPECT_TRUE(c.pad && r.token[at] == 0);
          continue;
        }
        ++mine;
        EXPECT_GT(slot, last) << "stable";
        last = slot;
        EXPECT_EQ(r.expert[static_cast<size_t>(slot)], static_cast<int32_t>(e));
        EXPECT_EQ(r.row[static_cast<size_t>(slot)], static_cast<int32_t>(at));
        EXPECT_EQ(r.token[at], slot / c.chosen);
      }
      used += mine;
      EXPECT_EQ(r.start[e + 1] - r.start[e], c.pad && mine > 0 ? rounded_rows(mine) : mine);
    }
    EXPECT_EQ(used, c.slots());
  }
}

TEST(ExpertRouting, OfEqualLogitsTheFirstAreChosenAndNaNsChooseDifferentOnes) {
  const Case c{3, 6, 3, true};
  Values logits(DType::kF32, c.tokens * c.experts);
  const double rows[3][6] = {{1, 1, 1, 1, 1, 1}, {0, 2, 1, 2, 1, 1}, {NAN, NAN, NAN, NAN, NAN, NAN}};
  for (int64_t i = 0; i < logits.size(); ++i) logits.set(i, rows[i / 6][i % 6]);
  const Routed r = routed(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, c, logits);
  EXPECT_EQ(r.expert, (std::vector<int32_t>{0, 1, 2, 1, 3, 2, 0, 1, 2}));
  EXPECT_TRUE(std::isnan(r.weight[6])) << "the loss says that something is wrong";
}

// d/dlogit of sum over the slots of weight * g, by central differences with the choice held.
double difference(const std::vector<double>& logits, size_t of, const std::vector<int32_t>& chosen,
                  bool renormalise, const std::vector<double>& g) {
  constexpr double kStep = 1e-5;
  double out = 0;
  for (const double side : {1.0, -1.0}) {
    std::vector<double> moved = logits;
    moved[of] += side * kStep;
    const std::vector<double> weights = weights_of(moved, chosen, renormalise);
    for (size_t j = 0; j < weights.size(); ++j) out += side * weights[j] * g[j];
  }
  return out / (2 * kStep);
}

TEST(ExpertRouting, TheGradientOfLogitsIsThatOfFiniteDifferences) {
  for (const Case& c : kCases) {
    SCOPED_TRACE("experts " + std::to_string(c.experts));
    constexpr int64_t kSurplus = 3;
    const Values logits = Values::random(DType::kF32, c.tokens * c.experts, 5, 1.5),
                 g = Values::random(DType::kF32, c.slots(), 6);
    const Outputs got = same_everywhere(
        [&](const Kernels& k, StreamView stream) {
          Routed r = routed(k, stream, c, logits);
          Values copy = g, out = Values::random(DType::kF32, (c.tokens + kSurplus) * c.experts, 7);
          k.route_backward({.probability = r.probability.data(),
                            .routing = r.view(),
                            .dweight = static_cast<const float*>(copy.data()),
                            .dlogits = view_of(out.data(), DType::kF32, c.tokens + kSurplus, c.experts),
                            .tokens = c.tokens,
                            .chosen = c.chosen,
                            .renormalise = c.renormalise},
                           stream);
          return Outputs{out};
        },
        Bits::kExp);
    std::vector<double> want;
    for (int64_t t = 0; t < c.tokens; ++t) {
      const std::vector<double> row = row_of(logits, t, c.experts), of_token = row_of(g, t, c.chosen);
      const std::vector<int32_t> chosen = largest(row, c.chosen);
      for (size_t e = 0; e < row.size(); ++e)
        want.push_back(difference(row, e, chosen, c.renormalise, of_token));
    }
    want.resize(static_cast<size_t>(got[0].size()), 0);  // rows behind the tokens
    expect_near(got[0], want, 1e-5, 4e-6, "dlogits");
  }
}

// loss = sum of factor * weight * g: what is left for route_backward is factor * g, and a factor's gradient
// the sum of its slots' weight * g.
TEST(ExpertRouting, FactorsOfExpertsMultiplyWeightsAndTheirGradients) {
  for (const Case& c : kCases) {
    SCOPED_TRACE("experts " + std::to_string(c.experts));
    const Values logits = Values::random(DType::kF32, c.tokens * c.experts, 5, 1.5),
                 g = Values::random(DType::kF32, c.slots(), 6),
                 factors = Values::random(DType::kF32, c.experts, 7);
    const Outputs got = same_everywhere(
        [&](const Kernels& k, StreamView stream) {
          Values copy = logits, of = factors, dweight = g, frozen = g, gradient(DType::kF32, c.experts);
          Routed r(c);
          k.route_tokens({.logits = view_of(copy.data(), DType::kF32, c.tokens, c.experts),
                          .probability = r.probability.data(),
                          .routing = r.view(),
                          .tokens = c.tokens,
                          .chosen = c.chosen,
                          .renormalise = c.renormalise,
                          .pad = c.pad,
                          .factors = static_cast<const float*>(of.data())},
                         stream);
          RouteFactors args{.probability = r.probability.data(),
                            .routing = r.view(),
                            .dweight = static_cast<float*>(dweight.data()),
                            .factors = static_cast<const float*>(of.data()),
                            .gradient = static_cast<float*>(gradient.data()),
                            .tokens = c.tokens,
                            .chosen = c.chosen,
                            .experts = c.experts,
                            .renormalise = c.renormalise};
          k.route_factors(args, stream);
          args.dweight = static_cast<float*>(frozen.data());
          args.gradient = nullptr;
          k.route_factors(args, stream);
          return Outputs{values_of(r.weight), dweight, gradient, frozen};
        },
        Bits::kExp);
    std::vector<double> weight, dweight, gradient(static_cast<size_t>(c.experts));
    for (int64_t t = 0; t < c.tokens; ++t) {
      const std::vector<double> row = row_of(logits, t, c.experts);
      const std::vector<int32_t> chosen = largest(row, c.chosen);
      const std::vector<double> plain = weights_of(row, chosen, c.renormalise);
      for (int64_t j = 0; j < c.chosen; ++j) {
        const int32_t e = chosen[static_cast<size_t>(j)];
        weight.push_back(plain[static_cast<size_t>(j)] * factors[e]);
        dweight.push_back(g[t * c.chosen + j] * factors[e]);
        gradient[static_cast<size_t>(e)] += plain[static_cast<size_t>(j)] * g[t * c.chosen + j];
      }
    }
    expect_near(got[0], weight, 3e-6, 1e-7, "weight");
    expect_near(got[1], dweight, 1e-6, 0, "dweight");
    expect_near(got[2], gradient, 3e-6, 2e-6, "gradient");
    expect_near(got[3], dweight, 1e-6, 0, "dweight beside frozen factors");
  }
}

TEST(ExpertRouting, RowsAreWeighedAndCombinedInTheOrderOfSlots) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case& c : kCases) {
      for (const int64_t width : {1, 24, 77}) {
        SCOPED_TRACE(dtype_text(dtype) + ", experts " + std::to_string(c.experts) + ", width " +
                     std::to_string(width));
        constexpr int64_t kSurplus = 2;
        const Values logits = Values::random(DType::kF32, c.tokens * c.experts, 8);
        Routed r = routed(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, c, logits);
        const int64_t rows = r.start.back();
        const Values x = Values::random(dtype, rows * width, 9),
                     other = Values::random(dtype, rows * width, 10),
                     addend = Values::random(dtype, (c.tokens + kSurplus) * width, 11);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values weighed = x, mate = other, dot(DType::kF32, c.slots()), sum = addend, plain = addend,
                 input = x;
          k.weigh_rows({.x = view_of(weighed.data(), dtype, rows, width),
                        .other = view_of(mate.data(), dtype, rows, width),
                        .dot = static_cast<float*>(dot.data()),
                        .routing = r.view()},
                       stream);
          const View sum_view = view_of(sum.data(), dtype, c.tokens + kSurplus, width);
          k.combine_rows({.x = view_of(input.data(), dtype, rows, width),
                          .addend = sum_view,
                          .out = sum_view,
                          .routing = r.view(),
                          .weighted = true,
                          .tokens = c.tokens,
                          .chosen = c.chosen},
                         stream);
          k.combine_rows({.x = view_of(input.data(), dtype, rows, width),
                          .out = view_of(plain.data(), dtype, c.tokens + kSurplus, width),
                          .routing = r.view(),
                          .tokens = c.tokens,
                          .chosen = c.chosen},
                         stream);
          return Outputs{weighed, dot, sum, plain};
        });
        std::vector<double> weighed(static_cast<size_t>(rows * width)), dot(static_cast<size_t>(c.slots())),
            sum(static_cast<size_t>(addend.size())), plain(sum.size());
        for (int64_t i = 0; i < addend.size(); ++i) sum[static_cast<size_t>(i)] = addend[i];
        for (int64_t i = 0; i < rows * width; ++i) {
          const int32_t slot = r.slot[static_cast<size_t>(i / width)];
          if (slot < 0) continue;
          const auto s = static_cast<size_t>(slot);
          const auto to = static_cast<size_t>(slot / c.chosen * width + i % width);
          const double weight = double{r.weight[s]};
          weighed[static_cast<size_t>(i)] = weight * x[i];
          dot[s] += x[i] * other[i];
          sum[to] += weight * x[i];
          plain[to] += x[i];
        }
        const double relative = relative_bound(dtype);
        expect_near(got[0], weighed, relative, 1e-6, "weighed");
        expect_near(got[1], dot, 1e-5, 1e-4, "dot");
        expect_near(got[2], sum, relative, 2e-5, "sum");
        expect_near(got[3], plain, relative, 2e-5, "plain");
      }
    }
  }
}

}  // namespace
}  // namespace lm
