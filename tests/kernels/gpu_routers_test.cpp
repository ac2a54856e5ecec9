// The kernels around a mixture's experts on the GPU: the factor of a shared expert's rows and the gradient of
// the loads' balance against the CPU's, sums over choices and their end against plain loops in fp64.
#include <cmath>

#include "tests/kernels/gpu_support.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

TEST_F(GpuKernels, RowsAreMultipliedByTheirGate) {
  int turn = 0;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t rows : {0, 1, 15, 70}) {
      for (const int64_t width : {1, 24, 77, 1032}) {
        if (!test::full_counts() && ++turn % 2 == 0) continue;
        const int64_t shift = turn % 3 == 0;
        SCOPED_TRACE(name("gate", t, {rows, width, shift}));
        Arrays arrays = {with(noise(t, rows, 1, 3, shift), {1, -kInf, 2, kInf, -30}, 7)};
        for (uint32_t i = 0; i < 3; ++i) arrays.push_back(noise(t, rows * width, 2 + i, 1, shift));
        arrays.push_back(zeros(t, rows, shift));
        // Some rows are zero.
        for (int64_t j = 0; rows > 2 && j < width; ++j) arrays[2].values.set(width + j, 0);
        check(
            arrays,
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              const View gate = view_of(p[0], t, rows, 1);
              k.gate_rows({.gate = gate, .x = view_of(p[1], t, rows, width)}, s);
              k.gate_rows({.gate = gate,
                           .x = view_of(p[2], t, rows, width),
                           .other = view_of(p[3], t, rows, width),
                           .dgate = view_of(p[4], t, rows, 1)},
                          s);
            },
            Want::kNear);
      }
    }
  }
}

// fp64 numbers travel in fp32 arrays, too.
Array doubles(const std::vector<double>& list) {
  Array a = zeros(DType::kF32, 2 * std::ssize(list));
  std::memcpy(a.values.data(), list.data(), list.size() * sizeof(double));
  return a;
}
std::vector<double> doubles_of(const Values& values) {
  std::vector<double> out(static_cast<size_t>(values.size() / 2));
  std::memcpy(out.data(), values.data(), out.size() * sizeof(double));
  return out;
}
double* f64(void* p) {
  return static_cast<double*>(p);
}

// What the device makes of `arrays`, with the same bits in every variant.
Outputs same_in_every_variant(const Arrays& arrays, const Body& body) {
  Outputs first;
  for (int variant = 0; variant < gpu_variants(); ++variant) {
    use_gpu_variant(variant);
    Outputs results = on_device(arrays, body, variant);
    for (size_t i = 0; variant > 0 && i < results.size(); ++i) {
      EXPECT_TRUE(results[i] == first[i]) << "array " << i << " varies: variant " << variant;
    }
    if (variant == 0) first = std::move(results);
  }
  use_gpu_variant(0);
  return first;
}
void expect_all_near(const std::vector<double>& got, const std::vector<double>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 1e-6 * std::abs(want[i]) + 1e-9) << what << "[" << i << "]";
}

struct Counted {
  int64_t tokens, experts, chosen;
  bool scores;
};

// Of each token: probabilities that add up to 1, or scores; and k different experts, never the last.
struct Choices {
  Array probability;
  std::vector<int32_t> expert, start;
};
Choices choices(const Counted& c) {
  Choices out{noise(DType::kF32, c.tokens * c.experts, 6), {}, {}};
  std::vector<int32_t> count(static_cast<size_t>(c.experts) + 1);
  for (int64_t t = 0; t < c.tokens; ++t) {
    double sum = 0;
    for (int64_t e = 0; e < c.experts; ++e) sum += std::exp(out.probability.values[t * c.experts + e]);
    for (int64_t e = 0; e < c.experts; ++e) {
      const double x = std::exp(out.probability.values[t * c.experts + e]);
      out.probability.values.set(t * c.experts + e, c.scores ? x / (1 + x) : x / sum);
    }
    if (t % 5 == 0) out.probability.values.set(t * c.experts, 0);  // it has no logarithm
    for (int64_t j = 0; j < c.chosen; ++j) {
      out.expert.push_back(static_cast<int32_t>((t * t + j) % (c.experts - 1)));
      ++count[static_cast<size_t>(out.expert.back()) + 1];
    }
  }
  int32_t before = 0;
  for (const int32_t one : count) out.start.push_back(before += one);
  return out;
}

TEST_F(GpuKernels, ChoicesProbabilitiesAndEntropiesAreAddedUp) {
  for (const Counted& c : {Counted{1, 4, 2, false}, Counted{70, 33, 3, false}, Counted{301, 128, 8, false},
                           Counted{600, 9, 3, true}, Counted{63, 257, 4, true}, Counted{0, 5, 2, false}}) {
    SCOPED_TRACE(name("count", DType::kF32, {c.tokens, c.experts, c.chosen, c.scores}));
    const Choices of = choices(c);
    const auto n = static_cast<size_t>(c.experts);
    std::vector<double> chosen(n, 1), probability(n, 2), entropy = {3};  // of what came before
    const Arrays arrays = {of.probability,
                           numbers(of.expert),
                           numbers(of.start),
                           doubles(chosen),
                           doubles(probability),
                           doubles(entropy),
                           zeros(DType::kF32, kRouteChunks * 2 * c.experts * 2)};
    const Outputs got = same_in_every_variant(arrays, [&](const Kernels& k, StreamView s, const Pointers& p) {
      k.count_routes({.probability = view_of(p[0], DType::kF32, c.tokens, c.experts),
                      .expert = i32(p[1]),
                      .chosen = c.chosen,
                      .sums = {.chosen = f64(p[3]), .probability = f64(p[4]), .entropy = f64(p[5])},
                      .scores = c.scores,
                      .start = i32(p[2]),
                      .partial = f64(p[6])},
                     s);
    });
    for (const int32_t e : of.expert) chosen[static_cast<size_t>(e)] += 1;
    for (int64_t t = 0; t < c.tokens; ++t) {
      double sum = c.scores ? 0 : 1;
      for (int64_t e = 0; c.scores && e < c.experts; ++e) sum += of.probability.values[t * c.experts + e];
      for (int64_t e = 0; e < c.experts; ++e) {
        const double share = of.probability.values[t * c.experts + e] / sum;
        probability[static_cast<size_t>(e)] += share;
        if (share > 0) entropy[0] -= share * std::log(share);
      }
    }
    EXPECT_EQ(doubles_of(got[3]), chosen);
    expect_all_near(doubles_of(got[4]), probability, "probability");
    expect_all_near(doubles_of(got[5]), entropy, "entropy");
  }
}

struct Settled {
  int64_t ranks, layers, experts, chosen;
};

// Sums that counts could have made: the second layer's experts, but for one, were never chosen.
std::vector<double> sums_of(const Settled& c) {
  std::vector<double> out;
  const Values p = Values::random(DType::kF32, c.ranks * c.layers * router_sums(c.experts), 9);
  for (int64_t i = 0; i < p.size(); ++i) {
    const int64_t at = i % router_sums(c.experts), layer = i / router_sums(c.experts) % c.layers;
    if (at < c.experts)
      out.push_back(layer == 1 && at > 0 ? 0 : static_cast<double>(c.chosen * (1 + i % 7)));
    else
      out.push_back(std::abs(p[i]));
  }
  return out;
}

TEST_F(GpuKernels, CountsOfRanksAreSettled) {
  for (const Settled& c :
       {Settled{1, 1, 4, 2}, Settled{3, 10, 40, 8}, Settled{2, 3, 300, 1}, Settled{1, 2, 1, 1}}) {
    SCOPED_TRACE(name("settle", DType::kF32, {c.ranks, c.layers, c.experts, c.chosen}));
    const std::vector<double> sums = sums_of(c);
    constexpr double kUnit = 1.5;
    const auto settled = [&](const std::vector<double>& of) {
      return same_in_every_variant({doubles(of), zeros(DType::kF32, c.experts), zeros(DType::kF32, 8)},
                                   [&](const Kernels& k, StreamView s, const Pointers& p) {
                                     k.settle_routes({.sums = f64(p[0]),
                                                      .ranks = c.ranks,
                                                      .layers = c.layers,
                                                      .experts = c.experts,
                                                      .chosen = c.chosen,
                                                      .each = router_sums(c.experts),
                                                      .entropy_unit = kUnit,
                                                      .fraction = f32(p[1]),
                                                      .figures = static_cast<RouterFigures*>(p[2])},
                                                     s);
                                   });
    };
    const auto sum = [&](int64_t layer, int64_t i) {
      double all = 0;
      for (int64_t r = 0; r < c.ranks; ++r)
        all += sums[static_cast<size_t>((r * c.layers + layer) * router_sums(c.experts) + i)];
      return all;
    };
    double rows = 0, balance = 0, most = 0, least = kInf, entropy = 0;
    for (int64_t l = 0; l < c.layers; ++l) {
      double all = 0, largest = 0, smallest = kInf;
      for (int64_t e = 0; e < c.experts; ++e) {
        all += sum(l, e);
        largest = std::max(largest, sum(l, e)), smallest = std::min(smallest, sum(l, e));
      }
      rows += all / static_cast<double>(c.chosen);
      most = std::max(most, largest * static_cast<double>(c.experts) / all);
      least = std::min(least, smallest * static_cast<double>(c.experts) / all);
      entropy += sum(l, 2 * c.experts);
    }
    std::vector<double> fraction;
    for (int64_t e = 0; e < c.experts; ++e) {
      double chosen = 0, probability = 0;
      for (int64_t l = 0; l < c.layers; ++l) chosen += sum(l, e), probability += sum(l, c.experts + e);
      fraction.push_back(chosen / rows / rows);
      balance += static_cast<double>(c.experts) * chosen / rows * probability / rows;
    }
    const Outputs got = settled(sums);
    std::vector<double> fractions;
    for (int64_t e = 0; e < c.experts; ++e) fractions.push_back(got[1][e]);
    expect_all_near(fractions, fraction, "fraction");
    expect_all_near(doubles_of(got[2]), {balance, most, least, entropy / rows / kUnit}, "figures");
    const Outputs none = settled(std::vector<double>(sums.size()));
    EXPECT_EQ(doubles_of(none[2]), std::vector<double>(4)) << "without a token";
    for (int64_t e = 0; e < c.experts; ++e) EXPECT_EQ(none[1][e], 0);
  }
}

TEST_F(GpuKernels, TheBalancesGradientIsAdded) {
  constexpr int64_t kSurplus = 2;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Counted& c : {Counted{1, 4, 2, false}, Counted{70, 33, 3, false}, Counted{9, 300, 8, false}}) {
      SCOPED_TRACE(name("balance", t, {c.tokens, c.experts}));
      Array fraction = noise(DType::kF32, c.experts, 4);
      for (int64_t e = 0; e < c.experts; ++e) fraction.values.set(e, std::abs(fraction.values[e]));
      check(
          {choices(c).probability, fraction, noise(t, (c.tokens + kSurplus) * c.experts, 7)},
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.balance_routes({.probability = f32(p[0]),
                              .fraction = f32(p[1]),
                              .dlogits = view_of(p[2], t, c.tokens + kSurplus, c.experts),
                              .tokens = c.tokens,
                              .factor = 0.75},
                             s);
          },
          Want::kNear);
    }
  }
}

}  // namespace
}  // namespace lm
