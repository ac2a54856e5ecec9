// A block is any list of sublayers: forward and backward of lists that no family has, against LibTorch's
// autograd in fp64.
#include "tests/model/block_case.h"

namespace lm {
namespace {

using namespace block_case;

TEST(Block, IsAnyListOfSublayers) {
  expect_as_autograd({
      {{"attention", "mlp"}},
      {{"mlp", "attention"}},
      {{"attention"}},
      {{"mlp"}},
      {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25},
      {.sublayers = {"attention", "mlp"}, .norm_after = true},                 // Gemma's
      {.sublayers = {"attention", "mlp"}, .norm = false, .norm_after = true},  // OLMo-2's
      {.sublayers = {"attention", "mlp"}, .norm = false},
      {.sublayers = {"mlp", "attention"}, .norm = false, .norm_after = true, .residual_scale = 3},
  });
}

TEST(Block, HasNormsOfEveryKindBeforeAndBehindItsMixers) {
  for (const NormKind kind : {NormKind::kRmsLate, NormKind::kRmsOffset, NormKind::kRmsPlain, NormKind::kLayer,
                              NormKind::kLayerOffset, NormKind::kLayerNoBias}) {
    SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)));
    expect_as_autograd(
        {
            {.sublayers = {"attention", "mlp"}, .kind = kind},
            {.sublayers = {"attention", "mlp"}, .norm_after = true, .kind = kind},
            {.sublayers = {"attention", "mlp"}, .norm = false, .norm_after = true, .kind = kind},
            {.sublayers = {"attention", "mlp"}, .norm_after = true, .residual_scale = 0.22, .kind = kind},
        },
        kLargerBound);
  }
}

TEST(Block, HasBiasesAndAnMlpWithoutAGate) {
  expect_as_autograd(
      {
          {.sublayers = {"attention", "plain"}, .kind = NormKind::kLayer, .biases = true},  // GPT-2's
          {.sublayers = {"attention", "mlp"}, .biases = true},
          {.sublayers = {"plain", "attention"}, .norm = false, .biases = true},
          {.sublayers = {"plain"}},
      },
      kLargerBound);
}

TEST(Block, HasExperts) {
  expect_as_autograd({
      {{"attention", "experts"}},
      {{"attention", "gated shared"}},
      {.sublayers = {"experts", "gated shared"}, .beside = true},
      {.sublayers = {"experts", "shared"}, .residual_scale = 0.25, .beside = true},
      {{"attention", "raw experts"}},
      {{"experts", "attention"}},
      {.sublayers = {"attention", "experts"}, .norm = false, .norm_after = true, .residual_scale = 0.25},
      {.sublayers = {"attention", "raw experts"}, .beside = true},
  });
}

// All but what the MLP saves, and nothing.
TEST(Block, KeepsWhatItsLevelOfRecomputationSays) {
  const auto kept = [](Recompute level) {
    Fixture f(spec_of({.sublayers = {"attention", "mlp"}}));
    at::Tensor dx;
    f.run(f.bind(), dx, level);
    return f.saved_bytes;
  };
  const int64_t none = kept(Recompute::kNone), attention = kept(Recompute::kAttention);
  Fixture f(spec_of({.sublayers = {"attention", "mlp"}}));
  const TransformerBlock block = f.bind();
  const ArenaFrame frame(f.arena);
  const int64_t before = f.arena.mark();
  std::get<GatedMlp>(block.sublayers[1].mixer).allocate(f.context, kRows);
  EXPECT_EQ(attention, none - (f.arena.mark() - before));
  EXPECT_EQ(kept(Recompute::kBlock), 0);
}

TEST(Block, IsMultipliedByItsLayersScalar) {
  expect_as_autograd({
      {.sublayers = {"attention", "mlp"}, .scalar = true},
      {.sublayers = {"attention", "mlp"},
       .norm_after = true,
       .kind = NormKind::kRmsLate,
       .scalar = true},  // Gemma 4's
      {.sublayers = {"mlp"}, .residual_scale = 0.25, .scalar = true},
  });
}

TEST(Block, HasAnInputOfItsOwn) {
  expect_as_autograd(
      {
          {.sublayers = {"attention", "mlp", "input"}, .norm = false, .norm_after = true, .scalar = true},
          {.sublayers = {"input"}},
          {.sublayers = {"mlp", "input"}, .norm_after = true, .residual_scale = 0.5},
      },
      kLargerBound);
}

TEST(Block, DropsWhatItsMixersAdd) {
  expect_as_autograd(
      {
          {.sublayers = {"attention", "plain"}, .kind = NormKind::kLayer, .biases = true, .dropout = 0.4},
          {.sublayers = {"mlp"}, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .norm = false, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .norm_after = true, .residual_scale = 3, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .beside = true, .scalar = true, .dropout = 0.4},
      },
      kLargerBound);
}

TEST(Block, DropsInTrainingAlone) {
  Fixture f(spec_of({.sublayers = {"attention", "mlp"}, .dropout = 0.4})),
      without(spec_of({.sublayers = {"attention", "mlp"}}));
  at::Tensor dx, want_dx;
  const at::Tensor out = f.run(f.bind(false), dx), want = without.run(without.bind(), want_dx);
  EXPECT_TRUE(out.equal(want));
  EXPECT_TRUE(dx.equal(want_dx));
  EXPECT_FALSE(f.run(f.bind(), dx).equal(want));
  const TransformerBlock block = f.bind();
  EXPECT_NE(block.sublayers[0].dropout.key, block.sublayers[1].dropout.key);
}

TEST(Rope, EveryTableIsThatOfItsSpec) {
  ModelSpec both = llama_spec({});
  both.ropes = {{.dim = 16}, {.dim = 8, .theta = 100}, {.dim = 24, .theta = 7}};
  const StreamView stream = start_torch(DeviceType::kCpu, 1, true);
  const RopeTable all(both, kRows, DType::kF32, DeviceType::kCpu, stream);
  for (int i = 0; i < 3; ++i) {
    ModelSpec alone = both;
    alone.ropes = {both.ropes[static_cast<size_t>(i)]};
    const RopeTable one(alone, kRows, DType::kF32, DeviceType::kCpu, stream);
    const int64_t elements = kRows * alone.ropes[0].dim / 2;
    EXPECT_TRUE(std::equal(one.cos(0), one.cos(0) + elements, all.cos(i))) << i;
    EXPECT_TRUE(std::equal(one.sin(0), one.sin(0) + elements, all.sin(i))) << i;
  }
}

}  // namespace
}  // namespace lm
