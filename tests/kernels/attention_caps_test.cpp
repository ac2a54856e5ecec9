// CPU attention with soft caps, and of heads wider than 256, against the fp64 reference.
#include <array>

#include "tests/kernels/attention_problem.h"

namespace lm::attention {
namespace {

Shape capped(Shape shape, float softcap) {
  shape.softcap = softcap;
  return shape;
}

class AttentionCaps : public testing::TestWithParam<DType> {};

TEST_P(AttentionCaps, EverySoftCapEqualsTheReference) {
  const std::vector<int32_t> lengths{1, 2, 3, 63, 64, 65, 130};
  for (const float softcap : {0.5f, 2.f, 50.f}) {
    for (const int64_t window : {0, 5, 64, 100}) {
      expect_reference(capped({4, 2, 32, window, lengths, GetParam()}, softcap));
      expect_reference(capped({3, 1, 18, window, lengths, GetParam()}, softcap));
    }
  }
  expect_reference(capped({2, 1, 256, 0, lengths, GetParam()}, 2));
}

// The scale stands inside the cap.
TEST_P(AttentionCaps, AnyScaleIsCappedAsTheReferenceDoes) {
  for (const float scale : {0.02f, 1.f}) {
    const Shape shape = capped({4, 2, 32, 0, {1, 90, 70}, GetParam()}, 3);
    Problem problem(shape);
    problem.scale = scale;
    const Reference reference(problem);
    for_every_path(shape, [&](const Path& path, const Reference&) {
      Problem p(shape);
      p.scale = scale;
      p.run(path);
      expect_reference(p, reference, path.name);
    });
  }
}

TEST_P(AttentionCaps, ACappedDocumentThatGoesOnEqualsTheReference) {
  for (const int64_t window : {0, 70}) {
    const Shape shape = capped({6, 2, 32, window, {150}, GetParam()}, 2);
    for_every_path(shape, [&](const Path& path, const Reference& reference) {
      expect_going_on(shape, reference, path.name,
                      [&](Problem& p, int64_t past) { p.forward(path, 2, past); });
    });
  }
}

TEST_P(AttentionCaps, WideHeadsEqualTheReference) {
  const std::vector<int32_t> lengths{1, 2, 3, 64, 65, 100};
  for (const auto& [heads, kv_heads, head_dim] :
       std::vector<std::array<int64_t, 3>>{{2, 1, 258}, {2, 2, 320}, {4, 2, 512}}) {
    for (const int64_t window : {0, 50})
      expect_reference({heads, kv_heads, head_dim, window, lengths, GetParam()});
    expect_reference(capped({heads, kv_heads, head_dim, 0, lengths, GetParam()}, 2));
  }
  const Shape shape{2, 1, 512, 0, {140}, GetParam()};
  for_every_path(shape, [&](const Path& path, const Reference& reference) {
    expect_going_on(shape, reference, path.name, [&](Problem& p, int64_t past) { p.forward(path, 1, past); });
  });
}

TEST_P(AttentionCaps, TheResultDoesNotDependOnThreads) {
  const Shape shape = capped({6, 2, 512, 70, {150, 1, 90}, GetParam()}, 2);
  for_every_path(shape, [&](const Path& path, const Reference&) {
    Problem one(shape), many(shape);
    one.run(path, 1);
    many.run(path, 3);
    EXPECT_EQ(one.out.bits(), many.out.bits()) << path.name;
    EXPECT_EQ(one.lse.bits(), many.lse.bits()) << path.name;
    EXPECT_EQ(one.dqkv.bits(), many.dqkv.bits()) << path.name;
  });
}

// tanh of numbers near 0 is as accurate as they are: scores far below the cap are what they were. (In fp64
// the largest here, of 1e-3 of the cap, lose 1e-6 of their size.)
TEST(AttentionCapsOfNothing, AHighSoftCapChangesNothing) {
  const Shape shape{4, 2, 32, 0, {1, 63, 130}};
  for_every_path(shape, [&](const Path& path, const Reference& reference) {
    Problem p(capped(shape, 1e5f));
    p.run(path);
    expect_reference(p, reference, path.name);
  });
}

// Of a score s each: P of two keys is 1 / (1 + e^(difference)), over the whole range of tanh.
TEST(AttentionCapsOfNothing, EveryScoreIsCappedWithinAMillionth) {
  Shape shape{1, 1, 2, 0, {2}};
  shape.softcap = 1;
  for (const char* name : kPathNames) {
    const Path* path = find_path(name, DType::kF32);
    if (path == nullptr) continue;
    for (double score = 1e-4; score < 30; score *= 1.05) {
      for (const double sign : {-1., 1.}) {
        Problem p(shape);
        p.scale = 1;
        for (int64_t i = 0; i < p.qkv.size(); ++i) p.qkv.set(i, 0);
        p.qkv.set(shape.stride(), 1);                                                // q of the second token
        p.qkv.set(shape.stride() + p.k_offset(), static_cast<float>(sign * score));  // and its own key
        p.forward(*path);
        const double capped = std::tanh(static_cast<float>(sign * score));
        EXPECT_NEAR(p.lse.get(1), std::log(1 + std::exp(capped)), 1e-6) << name << " " << sign * score;
      }
    }
  }
}

TEST(AttentionCapsOfNothing, GradientsEqualFiniteDifferences) {
  const Shape shape = capped({4, 2, 6, 3, {2, 5}}, 1.5f);
  const Path& path = best_path(shape.dtype);
  Problem p(shape, 3);
  p.run(path);
  const auto loss = [&](int64_t moved, float step) {
    Problem q(shape, 3);
    q.qkv.set(moved, q.qkv.get(moved) + step);
    q.forward(path);
    double sum = 0;
    for (int64_t i = 0; i < q.out.size(); ++i) sum += static_cast<double>(q.out.get(i)) * q.dout.get(i);
    return sum;
  };
  for (int64_t i = 0; i < p.qkv.size(); ++i) {
    if (i % shape.stride() >= shape.stride() - shape.gap) continue;
    const float step = 1e-2f;
    EXPECT_NEAR((loss(i, step) - loss(i, -step)) / (2 * step), p.dqkv.get(i),
                1e-2 * std::abs(p.dqkv.get(i)) + 5e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionCaps, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace lm::attention
