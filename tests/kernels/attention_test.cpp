// CPU attention against the fp64 reference, and the promises that it makes about bits: threads, packing,
// memory that is not its own.
#include <array>

#include "tests/kernels/attention_problem.h"

namespace lm::attention {
namespace {

class AttentionShapes : public testing::TestWithParam<DType> {};

TEST_P(AttentionShapes, EveryHeadDimAndGroupEqualsTheReference) {
  const std::vector<int32_t> lengths{1, 2, 3, 63, 64, 65, 130};
  for (const auto& [heads, kv_heads, head_dim] : std::vector<std::array<int64_t, 3>>{{3, 1, 2},
                                                                                     {2, 2, 8},
                                                                                     {6, 2, 16},
                                                                                     {4, 1, 34},
                                                                                     {3, 3, 64},
                                                                                     {9, 3, 64},
                                                                                     {3, 1, 80},
                                                                                     {2, 1, 128},
                                                                                     {2, 2, 256}}) {
    expect_reference({heads, kv_heads, head_dim, 0, lengths, GetParam()});
  }
}

TEST_P(AttentionShapes, EveryWindowEqualsTheReference) {
  const std::vector<int32_t> lengths{1, 2, 3, 63, 64, 65, 200};
  for (const int64_t window : {0, 1, 5, 64, 100}) {
    expect_reference({3, 1, 64, window, lengths, GetParam()});
    expect_reference({2, 2, 16, window, lengths, GetParam()});
    expect_reference({5, 1, 8, window, lengths, GetParam()});
  }
}

TEST_P(AttentionShapes, ADocumentThatGoesOnEqualsTheReference) {
  for (const int64_t window : {0, 1, 70}) {
    const Shape shape{6, 2, 32, window, {150}, GetParam()};
    for_every_path(shape, [&](const Path& path, const Reference& reference) {
      expect_going_on(shape, reference, path.name,
                      [&](Problem& p, int64_t past) { p.forward(path, 2, past); });
    });
  }
}

TEST_P(AttentionShapes, MoreHeadsInAGroupThanRowsInATile) {
  expect_reference({200, 1, 8, 3, {1, 7}, GetParam()});
}

TEST_P(AttentionShapes, TheResultDoesNotDependOnThreads) {
  for (const int64_t window : {0, 70}) {
    const Shape shape{6, 2, 32, window, {300, 1, 90}, GetParam()};
    for (const char* name : kPathNames) {
      const Path* path = find_path(name, shape.dtype);
      if (path == nullptr) continue;
      Problem one(shape);
      one.run(*path, 1);
      for (const int threads : {2, 3, 7}) {
        Problem many(shape);
        many.run(*path, threads);
        EXPECT_EQ(one.out.bits(), many.out.bits()) << name << " " << threads;
        EXPECT_EQ(one.lse.bits(), many.lse.bits()) << name << " " << threads;
        EXPECT_EQ(one.dqkv.bits(), many.dqkv.bits()) << name << " " << threads;
      }
    }
  }
}

TEST_P(AttentionShapes, PackedDocumentsEqualSeparateCalls) {
  const Shape shape{3, 1, 48, 50, {65, 1, 130, 31}, GetParam()};
  const Path& path = best_path(shape.dtype);
  Problem packed(shape);
  packed.run(path);
  for (size_t document = 0; document < shape.lengths.size(); ++document) {
    Shape alone = shape;
    alone.lengths = {shape.lengths[document]};
    Problem p(alone);
    const int64_t begin = packed.start[document], tokens = alone.tokens();
    for (int64_t i = 0; i < p.qkv.size(); ++i) p.qkv.set(i, packed.qkv.get(begin * shape.stride() + i));
    for (int64_t i = 0; i < p.dout.size(); ++i)
      p.dout.set(i, packed.dout.get(begin * shape.q_elements() + i));
    p.run(path);
    EXPECT_EQ(p.out.bits(), packed.out.bits(begin * shape.q_elements(), p.out.size()));
    EXPECT_EQ(p.dqkv.bits(), packed.dqkv.bits(begin * shape.stride(), p.dqkv.size()));
    for (int64_t h = 0; h < shape.heads; ++h) {
      EXPECT_EQ(p.lse.bits(h * tokens, tokens), packed.lse.bits(h * shape.tokens() + begin, tokens));
    }
  }
}

// Scores of several hundred: exponents overflow without a reference, and rows are dominated by one key.
TEST_P(AttentionShapes, LargeScoresStayFinite) {
  const Shape shape{2, 1, 64, 0, {150}, GetParam()};
  for (const char* name : kPathNames) {
    const Path* path = find_path(name, shape.dtype);
    if (path == nullptr) continue;
    Problem p(shape);
    p.scale = 8;
    const Reference reference(p);
    p.run(*path);
    expect_near(p.lse, 0, 1, 1, reference.lse, DType::kF32, std::string(name) + " lse");
    expect_near(p.out, 0, shape.q_elements(), shape.q_elements(), reference.out, DType::kBF16, name);
    for (int64_t i = 0; i < p.dqkv.size(); ++i) ASSERT_TRUE(std::isfinite(p.dqkv.get(i))) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionShapes, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

// The loss sum(dout * out), moved along random directions of q, k and v.
TEST(Attention, EveryPathRunsHere) {
  std::string missing;
  for (const char* name : kPathNames) {
    const bool here = find_path(name, DType::kBF16) != nullptr;
    if (!here) missing += std::string(" ") + name;
  }
  if (!missing.empty()) GTEST_SKIP() << "this machine cannot run" << missing;
}

TEST(Attention, GradientsEqualFiniteDifferences) {
  const Shape shape{4, 2, 6, 3, {2, 5}};
  const Path& path = best_path(shape.dtype);
  Problem p(shape, 3);
  p.run(path);
  const auto loss = [&](const std::vector<float>& direction, float step) {
    Problem moved(shape, 3);
    for (int64_t i = 0; i < moved.qkv.size(); ++i) moved.qkv.set(i, moved.qkv.get(i) + step * direction[i]);
    moved.forward(path);
    double sum = 0;
    for (int64_t i = 0; i < moved.out.size(); ++i)
      sum += static_cast<double>(moved.out.get(i)) * moved.dout.get(i);
    return sum;
  };
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 5; ++trial) {
    std::vector<float> direction(p.qkv.size());
    double expected = 0;
    for (int64_t i = 0; i < p.qkv.size(); ++i) {
      if (i % shape.stride() >= shape.stride() - shape.gap) continue;
      direction[i] = normal(random);
      expected += static_cast<double>(direction[i]) * p.dqkv.get(i);
    }
    const float step = 1e-3f;
    EXPECT_NEAR((loss(direction, step) - loss(direction, -step)) / (2 * step), expected,
                2e-3 * std::abs(expected) + 5e-3);
  }
}

TEST(Attention, RefusesAHeadDimensionThatItCannotServe) {
  Problem p({1, 1, 8, 0, {4}});
  p.shape.head_dim = 7;
  EXPECT_ANY_THROW(p.forward(best_path(DType::kF32)));
}

}  // namespace
}  // namespace lm::attention
