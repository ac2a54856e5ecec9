// Parameter groups: each tensor of the files is updated as if it were alone, with its group's learning rate
// and weight decay, by every kind of rule and with tiles of any length.
#include <gtest/gtest.h>

#include <random>

#include "optim/sharded_optimizer.h"
#include "plan/parameter_groups.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr double kLr = 0.01, kDecay = 0.1;

std::vector<float> of_block(const BlockLayout& block, uint32_t seed) {
  std::vector<float> out(static_cast<size_t>(block.flat_elements), 0.F);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, 0.1F);
  for (const TensorPlace& place : block.tensors) {
    const auto begin = out.begin() + place.offset;
    std::generate(begin, begin + place.parameter.elements(), [&] { return normal(engine); });
  }
  return out;
}

std::vector<float> trained(const ModelLayout& layout, size_t b, const OptimizerConfig& config,
                           int64_t granules) {
  TileLayout tiles;
  for (const BlockLayout& block : layout.blocks) {
    tiles.first_tile.push_back(std::ssize(tiles.first_granule));
    for (int64_t g = 0; g < block.flat_elements / kGranule; g += granules) {
      tiles.first_granule.push_back(g);
      tiles.granules.push_back(std::min(granules, block.flat_elements / kGranule - g));
    }
  }
  tiles.first_tile.push_back(std::ssize(tiles.first_granule));
  ShardedOptimizer optimizer({.layout = layout,
                              .config = config,
                              .weight_dtype = DType::kF32,
                              .kernels = kernels(DeviceType::kCpu),
                              .tiles = tiles},
                             {DeviceType::kCpu, nullptr, 1});
  std::vector<float> weights = of_block(layout.blocks[b], 1);
  for (uint32_t step = 1; step <= 3; ++step) {
    const std::vector<float> gradients = of_block(layout.blocks[b], 10 + step);
    optimizer.begin_update();
    optimizer.update(static_cast<int64_t>(b),
                     {.weights = reinterpret_cast<std::byte*>(weights.data()),
                      .gradients = reinterpret_cast<const std::byte*>(gradients.data()),
                      .lr = kLr,
                      .step = step,
                      .elements = layout.blocks[b].flat_elements});
  }
  return weights;
}

struct Settings {
  double lr_scale = 1;
  std::optional<double> decay = {};
};
Settings settings_of(const std::string& name) {
  if (name.find("q_proj") != std::string::npos) return {0.1, {}};
  if (name.find("up_proj") != std::string::npos) return {1, 0.3};
  if (name.find("post_attention_layernorm") != std::string::npos) return {2, 0.2};
  return {};
}

// The layout has groups that are cut out of fused tensors; a model in which all of them have those settings
// is the reference, and its own group's tensors are compared.
void expect_each_as_if_alone(RuleId rule, int64_t granules) {
  ModelSpec spec = llama_spec({});
  spec.tied = true;
  const ModelLayout plain = make_layout(spec, nullptr, DType::kF32);
  OptimizerConfig config;
  config.name = rule;
  config.weight_decay = kDecay;
  config.groups = {
      {"q_proj", 0.1, {}}, {"regex:up_proj[.]weight$", 1, 0.3}, {"post_attention_layernorm", 2, 0.2}};
  ModelLayout grouped = plain;
  set_groups(config, grouped);
  const std::vector<float> got = trained(grouped, 1, config, granules);
  const BlockLayout& block = plain.blocks[1];
  for (const TensorPlace& place : block.tensors) {
    for (const ParameterPart& part : place.parameter.parts) {
      const Settings own = settings_of(part.name);
      OptimizerConfig all = config;
      all.groups = {{"regex:.", own.lr_scale, {}}};
      all.weight_decay = kDecay;
      if (own.decay) all.groups[0].weight_decay = own.decay;
      ModelLayout reference = plain;
      set_groups(all, reference);
      const std::vector<float> want = trained(reference, 1, all, 1000);
      const auto first = static_cast<std::ptrdiff_t>(place.offset + part.first * place.parameter.columns);
      const auto end = first + static_cast<std::ptrdiff_t>(part.rows * place.parameter.columns);
      EXPECT_TRUE(std::equal(got.begin() + first, got.begin() + end, want.begin() + first))
          << rule_text(rule).name << ": " << part.name << ", tiles of " << granules;
    }
  }
}

TEST(Groups, EachTensorIsUpdatedWithItsOwnSettings) {
  expect_each_as_if_alone(Rules::id<AdamW>(), 1);
  expect_each_as_if_alone(Rules::id<AdamW>(), 1000);
  expect_each_as_if_alone(Rules::id<AdamW8bit>(), 3);
  expect_each_as_if_alone(Rules::id<Adafactor>(), 1000);
}

// The reference above is of groups, too: its settings are those of the formula.
TEST(Groups, ScaleTheRateAndReplaceTheDecay) {
  ModelSpec spec = llama_spec({});
  spec.tied = true;
  const ModelLayout plain = make_layout(spec, nullptr, DType::kF32);
  const auto run = [&](double lr_scale, std::optional<double> decay, double weight_decay) {
    OptimizerConfig config;
    config.weight_decay = weight_decay;
    config.groups = {{"regex:.", lr_scale, decay}};
    ModelLayout layout = plain;
    set_groups(config, layout);
    return trained(layout, 1, config, 1000);
  };
  const std::vector<float> start = of_block(plain.blocks[1], 1), as_it_is = run(1, {}, kDecay);
  OptimizerConfig none;
  none.weight_decay = kDecay;
  EXPECT_TRUE(as_it_is == trained(plain, 1, none, 1000));
  EXPECT_TRUE(run(0, {}, kDecay) == start);
  const DecayRange& vectors = plain.blocks[1].ranges.back();
  ASSERT_FALSE(vectors.decay);
  const std::vector<float> decayed = run(1, kDecay, 0);
  // Matrices as with optimizer.weight_decay; vectors, which have none by that, are smaller.
  EXPECT_TRUE(std::equal(decayed.begin(), decayed.begin() + vectors.first, as_it_is.begin()));
  EXPECT_FALSE(std::equal(decayed.begin() + vectors.first, decayed.end(), as_it_is.begin() + vectors.first));
  EXPECT_TRUE(run(1, 0.0, kDecay) == run(1, {}, 0));
}

}  // namespace
}  // namespace lm
