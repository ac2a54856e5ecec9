// optimizer.groups: which elements a group has, what matches nothing, and that no size depends on them.
#include "plan/parameter_groups.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "shapes.h"

namespace lm {
namespace {

ModelLayout layout_with(std::vector<OptimizerGroup> groups, RuleId rule = Rules::id<AdamW>(),
                        bool lora = false, const ModelSpec& spec = smollm2_135m()) {
  const AdapterSpec adapter = adapter_r16();
  ModelLayout layout = make_layout(spec, lora ? &adapter : nullptr, DType::kBF16);
  OptimizerConfig config;
  config.name = rule;
  config.groups = std::move(groups);
  set_groups(config, layout);
  return layout;
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    return error.text().what + "; " + error.text().next;
  }
  return "";
}

TEST(ParameterGroups, HaveThePartsOfATensorThatTheyName) {
  const ModelLayout layout =
      layout_with({{"layers.3.self_attn.k_proj", 0.1, 0.5}, {"self_attn", 2, {}}, {"norm", 3, 0.0}});
  const BlockLayout& third = layout.blocks[4];
  const TensorPlace& qkv = *third.find("layers.3.attn.qkv");
  ASSERT_EQ(qkv.parameter.parts.size(), 3U);
  const int64_t columns = qkv.parameter.columns, q = 576 * columns, k = 192 * columns;
  // q, k, v and o; o lies behind v, in the same group.
  ASSERT_EQ(third.groups.size(), 3U);
  EXPECT_EQ(third.groups[0].first, qkv.offset);
  EXPECT_EQ(third.groups[0].elements, q);
  EXPECT_EQ(third.groups[0].lr_scale, 2);
  EXPECT_FALSE(third.groups[0].weight_decay.has_value());
  EXPECT_EQ(third.groups[1].first, qkv.offset + q);
  EXPECT_EQ(third.groups[1].elements, k);
  EXPECT_EQ(third.groups[1].lr_scale, 0.1);
  EXPECT_EQ(third.groups[1].weight_decay, 0.5);
  EXPECT_EQ(third.groups[2].first, qkv.offset + q + k);
  EXPECT_EQ(third.groups[2].elements, k + third.find("layers.3.attn.out")->parameter.elements());
  EXPECT_EQ(layout.blocks[1].groups.size(), 1U);
  // "norm" is a segment of the last norm's name alone.
  ASSERT_EQ(layout.blocks.back().groups.size(), 1U);
  EXPECT_EQ(layout.blocks.back().groups[0].lr_scale, 3);
  EXPECT_TRUE(layout.blocks.front().groups.empty());
}

TEST(ParameterGroups, NameTheTensorsOfAnAdapter) {
  const ModelLayout layout = layout_with({{"lora_B", 16, {}}}, Rules::id<AdamW>(), true);
  const BlockLayout& block = layout.blocks[1];
  EXPECT_EQ(block.groups.size(), 7U);
  for (const Trainable& entry : block.trainables) {
    const TensorPlace& place = block.tensors[entry.tensor];
    const bool in = std::ranges::any_of(block.groups, [&](const GroupRange& group) {
      return place.offset >= group.first &&
             place.offset + place.parameter.elements() <= group.first + group.elements;
    });
    EXPECT_EQ(in, entry.role == TrainableRole::kLoraB) << place.parameter.name;
  }
}

TEST(ParameterGroups, ThatMatchNothingAreRefusedWithTheNearestName) {
  EXPECT_NE(refusal([] {
              layout_with({{"q_porj", 0.1, {}}});
            }).find("did you mean \"q_proj\"?"),
            std::string::npos);
  EXPECT_NE(refusal([] {
              layout_with({{"mlp", 0.1, {}}, {"self_atn.q_proj", 0.1, {}}});
            })
                .find("match = \"self_atn.q_proj\" is in no name of a trained tensor; did you mean "
                      "\"self_attn.q_proj\"?"),
            std::string::npos);
  // What is frozen is not trained; a tied head is the embedding.
  EXPECT_NE(refusal([] { layout_with({{"embed_tokens", 0.1, {}}}, Rules::id<AdamW>(), true); }), "");
  EXPECT_NE(refusal([] { layout_with({{"lm_head", 0.1, {}}}); }), "");
  EXPECT_NE(refusal([] { layout_with({{"regex:nothing", 0.1, {}}}); }).find("such as"), std::string::npos);
  // One whose tensors an earlier group has matches them nevertheless.
  EXPECT_EQ(refusal([] { layout_with({{"self_attn", 0.1, {}}, {"q_proj", 0.5, {}}}); }), "");
}

TEST(ParameterGroups, DoNotCutABlockOfQuantizedState) {
  // A part of 3 x 28 x 90 elements, which 256 does not divide.
  const ModelSpec odd = make_spec({90, 120, 2, 3, 1, 28, 300});
  const std::string why = refusal([&] {
    layout_with({{"q_proj", 0.1, {}}}, Rules::id<AdamW8bit>(), false, odd);
  });
  EXPECT_NE(why.find("q_proj.weight lies beside other tensors"), std::string::npos) << why;
  EXPECT_EQ(refusal([&] { layout_with({{"q_proj", 0.1, {}}}, Rules::id<AdamW>(), false, odd); }), "");
  EXPECT_EQ(refusal([&] { layout_with({{"self_attn", 0.1, {}}}, Rules::id<AdamW8bit>(), false, odd); }), "");
  EXPECT_EQ(refusal([&] { layout_with({{"q_proj", 0.1, {}}}, Rules::id<AdamW8bit>()); }), "");
}

}  // namespace
}  // namespace lm
