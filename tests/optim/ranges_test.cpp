// The ranges of a block that a rule updates: with one set of settings each, or whole tensors with their
// shape.
#include "optim/ranges.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

ModelLayout small_layout() {
  ModelSpec spec = llama_spec({});
  spec.tied = true;
  return make_layout(spec, nullptr, DType::kF32);
}

TEST(Ranges, AreWhereOneSetOfSettingsCounts) {
  ModelLayout layout = small_layout();
  BlockLayout& block = layout.blocks[1];
  ASSERT_EQ(block.ranges.size(), 2U);
  block.groups = {{block.ranges[1].first - 100, 200, 0.5, 0.3}};
  // One granule of the first range, and the second.
  const int64_t from = block.ranges[1].first - kGranule;
  std::vector<RuleRange> found;
  each_range(block, from, block.flat_elements, false,
             [&](const RuleRange& range) { found.push_back(range); });
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].first, from);
  EXPECT_EQ(found[0].elements, kGranule);
  EXPECT_TRUE(found[0].decay);
  EXPECT_EQ(found[1].first, block.ranges[1].first);
  EXPECT_EQ(found[1].elements, block.ranges[1].elements);
  EXPECT_FALSE(found[1].decay);
  // A parameter group cuts each of them.
  std::vector<RuleRange> cut;
  for (const RuleRange& range : found)
    each_group(block, range, [&](const RuleRange& own) { cut.push_back(own); });
  ASSERT_EQ(cut.size(), 4U);
  const int64_t second = block.ranges[1].first;
  const int64_t firsts[] = {from, second - 100, second, second + 100};
  for (size_t i = 0; i < cut.size(); ++i) {
    EXPECT_EQ(cut[i].first, firsts[i]);
    EXPECT_EQ(cut[i].first + cut[i].elements, i < 3 ? firsts[i + 1] : block.flat_elements);
    EXPECT_EQ(cut[i].decay, i < 2);
    EXPECT_EQ(cut[i].lr_scale, i == 1 || i == 2 ? 0.5 : 1);
    EXPECT_EQ(cut[i].weight_decay.has_value(), i == 1 || i == 2);
  }
}

TEST(Ranges, AreWholeTensorsForARuleThatWantsThem) {
  const ModelLayout layout = small_layout();
  const BlockLayout& block = layout.blocks[1];
  std::vector<std::string> names;
  each_range(block, 0, block.flat_elements, true, [&](const RuleRange& range) {
    ASSERT_NE(range.tensor, nullptr);
    const Parameter& p = range.tensor->parameter;
    names.push_back(p.name);
    EXPECT_EQ(range.first, range.tensor->offset);
    EXPECT_EQ(range.elements, p.rows * p.columns);
    EXPECT_EQ(range.decay, !p.vector()) << p.name;
  });
  std::vector<std::string> all;
  for (const TensorPlace& place : block.tensors) all.push_back(place.parameter.name);
  EXPECT_EQ(names, all);
  const auto nothing = [](const RuleRange&) {};
  EXPECT_NO_THROW(each_range(block, kGranule, block.flat_elements, true, nothing)) << "behind q, beside k";
  EXPECT_THROW(each_range(block, kGranule / 2, block.flat_elements, true, nothing), Error);
}

}  // namespace
}  // namespace lm
