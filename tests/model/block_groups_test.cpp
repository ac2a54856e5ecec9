// Sublayers of a block beside each other: behind one norm, or each with its own and a norm of their sum.
#include "tests/model/block_case.h"

namespace lm {
namespace {

using namespace block_case;

// Gemma 4's, and others of which no family's files are.
TEST(Block, HasANormOfASum) {
  constexpr const char* kExperts = "experts of the stream";
  const auto shape = [](std::vector<const char*> sublayers, NormKind kind = NormKind::kRmsLate) {
    return Shape{.sublayers = std::move(sublayers), .norm_after = true, .kind = kind, .joined = true};
  };
  Shape scaled = shape({"attention", "mlp", kExperts}), bare = shape({"mlp", kExperts});
  scaled.scalar = true;
  bare.norm = false;
  expect_as_autograd(
      {shape({"attention", "mlp", kExperts}), scaled, bare, shape({"mlp", "attention"}, NormKind::kRmsOffset),
       shape({"attention", "mlp"}), shape({"attention", "mlp", kExperts}, NormKind::kLayerNoBias)},
      kLargerBound);
}

// A norm of a sum of outputs that have not been normed, that are scaled, or of which one is normed before.
TEST(Block, AGroupThatNoPassComputesIsRefused) {
  const Shape good{.sublayers = {"attention", "mlp"}, .norm_after = true, .joined = true};
  EXPECT_NO_THROW(Fixture(spec_of(good)).bind());
  Shape bare = good, scaled = good, dropped = good;
  bare.norm_after = false, scaled.residual_scale = 2, dropped.dropout = 0.5;
  for (const Shape& shape : {bare, scaled, dropped}) EXPECT_THROW(Fixture(spec_of(shape)).bind(), Error);
  ModelSpec twice = spec_of(good);
  twice.layers[0].sublayers[1].norm_joined = NormSpec{.kind = NormKind::kRms};
  EXPECT_THROW(Fixture(twice).bind(), Error);
}

// Nobody wants the block's dx, and nothing else of it is trained.
TEST(Block, TheNormOfASumIsTrainedAlone) {
  const Shape shape{
      .sublayers = {"attention", "mlp", "experts of the stream"}, .norm_after = true, .joined = true};
  Fixture whole(spec_of(shape)), f(spec_of(shape));
  at::Tensor dx;
  whole.run(whole.bind(), dx);
  TransformerBlock block = f.bind();
  for (Sublayer& sublayer : block.sublayers) {
    for (std::optional<Norm>* const norm : {&sublayer.norm, &sublayer.norm_after})
      if (*norm) (*norm)->weight.gradient = {};
    const auto freeze = [](const char*, auto& part) {
      if constexpr (requires { part.weight.weight; }) part.weight.gradient = {};
      if constexpr (requires { part.values.gradient; }) part.values.gradient = {};
    };
    std::visit([&](auto& mixer) { mixer.visit(mixer, freeze); }, sublayer.mixer);
  }
  f.run(block, dx, Recompute::kNone, false);
  const at::Tensor got = f.find(f.gradients, "mlp.norm_joined");
  EXPECT_TRUE(got.equal(whole.find(whole.gradients, "mlp.norm_joined")));
  EXPECT_TRUE(f.find(f.gradients, "mlp.norm").eq(7).all().item<bool>()) << "frozen";
}

TEST(Block, HasMixersBesideEachOther) {
  expect_as_autograd({
      {.sublayers = {"attention", "mlp"}, .kind = NormKind::kLayerNoBias, .beside = true},  // Cohere2's
      {.sublayers = {"mlp", "attention"}, .kind = NormKind::kLayer, .biases = true, .beside = true},
      {.sublayers = {"attention", "mlp"}, .norm = false, .beside = true},
      {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25, .beside = true},
      {.sublayers = {"attention", "mlp"}, .norm_after = true, .beside = true},
      {.sublayers = {"attention", "mlp"}, .kind = NormKind::kRmsPlain, .beside = true, .scalar = true},
  });
}

// Behind other sublayers, and before them: as two blocks, one after the other.
TEST(Block, HasMixersBesideEachOtherAnywhereInItsList) {
  for (const bool group_first : {false, true}) {
    for (const Recompute level : kLevels) {
      SCOPED_TRACE((group_first ? "first, recompute " : "last, recompute ") + std::string(name_of(level)));
      Fixture group(spec_of({.sublayers = {"attention", "mlp"}, .beside = true})),
          alone(spec_of({.sublayers = {"plain"}}));
      Fixture &first = group_first ? group : alone, &second = group_first ? alone : group;
      TransformerBlock both = first.bind();
      for (const Sublayer& sublayer : second.bind().sublayers) both.sublayers.push_back(sublayer);
      at::Tensor dx, between, want_dx;
      const at::Tensor out = first.run(both, dx, level);
      const at::Tensor of_first = first.gradients.clone(), of_second = second.gradients.clone();

      second.x = first.run(first.bind(), between);
      second.dy = first.dy;
      expect_near(out, second.run(second.bind(), between), "output");
      first.dy = between;
      first.run(first.bind(), want_dx);
      expect_near(dx, want_dx, "dx");
      expect_near(of_first, first.gradients, "gradients of the first");
      expect_near(of_second, second.gradients, "gradients of the second");
    }
  }
}

// What a sublayer beside another one reads is kept once.
TEST(Block, KeepsWhatMixersBesideEachOtherReadOnce) {
  const auto kept = [](bool beside) {
    Fixture f(spec_of({.sublayers = {"attention", "mlp"}, .beside = beside}));
    at::Tensor dx;
    f.run(f.bind(), dx);
    return f.saved_bytes;
  };
  EXPECT_LE(kept(true) + kRows * 48 * 4, kept(false));
}

}  // namespace
}  // namespace lm
