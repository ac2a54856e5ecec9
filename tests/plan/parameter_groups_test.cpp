// optimizer.groups: which elements a group has, what matches nothing, and that no size depends on them.
// train.only: what is frozen, and that a plan has nothing for it but its weights.
#include "plan/parameter_groups.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "plan/trained_tensors.h"
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

TEST(ParameterGroups, OfBAndMagnitudesMultiplyWithTheirTensorsGroup) {
  AdapterSpec adapter = adapter_r16();
  adapter.dora = true;
  ModelLayout layout = make_layout(smollm2_135m(), &adapter, DType::kBF16);
  OptimizerConfig config;
  config.groups = {{"layers.3.self_attn.q_proj", 0.5, 0.1}};
  set_groups(config, layout, 16);
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      const TensorPlace& place = block.tensors[entry.tensor];
      const bool grouped = place.parameter.name.starts_with("layers.3.q_proj");
      const bool faster = entry.role != TrainableRole::kLoraA;
      double scale = 1;
      bool decay = false;
      for (const GroupRange& group : block.groups) {
        if (place.offset < group.first || place.offset >= group.first + group.elements) continue;
        EXPECT_LE(place.offset + place.parameter.elements(), group.first + group.elements);
        scale = group.lr_scale;
        decay = group.weight_decay.has_value();
      }
      EXPECT_EQ(scale, (faster ? 16 : 1) * (grouped ? 0.5 : 1)) << place.parameter.name;
      EXPECT_EQ(decay, grouped) << place.parameter.name;
    }
  }
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

Case only(std::vector<std::string> names, const ModelSpec& spec = smollm2_135m()) {
  Case c{.spec = spec};
  c.config.train.only = std::move(names);
  c.config.train.recompute = Recompute::kNone;
  c.config.train.micro_batch = 1;
  return c;
}

int64_t elements_of(const BlockLayout& block, const std::string& name) {
  return block.find(name)->parameter.elements();
}

TEST(TrainedTensors, LeaveTheOthersFrozen) {
  const ModelSpec spec = make_spec({64, 160, 3, 4, 2, 16, 500}, false);
  const ModelLayout all = Case{.spec = spec}.layout(nullptr),
                    layers = only({"model.layers"}, spec).layout(nullptr),
                    some = only({"layers.1.mlp", "regex:^model[.]norm"}, spec).layout(nullptr);
  EXPECT_EQ(all.first_trained(), 0);
  EXPECT_EQ(layers.first_trained(), 1);
  EXPECT_EQ(some.first_trained(), 2);
  EXPECT_EQ(layers.blocks.front().flat_elements, 0);
  EXPECT_EQ(layers.blocks.back().flat_elements, 0);
  EXPECT_EQ(layers.trainable_elements + 2 * 500 * 64 + 64, all.trainable_elements);
  EXPECT_EQ(layers.frozen_elements, 2 * 500 * 64 + 64);
  for (size_t b = 1; b < 4; ++b) EXPECT_EQ(layers.blocks[b].flat_elements, all.blocks[b].flat_elements);
  const BlockLayout& second = some.blocks[2];
  EXPECT_EQ(some.blocks[1].flat_elements, 0);
  EXPECT_EQ(second.parameter_elements,
            elements_of(second, "layers.1.mlp.gate_up") + elements_of(second, "layers.1.mlp.down"));
  EXPECT_TRUE(second.find("layers.1.attn.qkv")->frozen);
  EXPECT_EQ(some.blocks.back().parameter_elements, 64);
  EXPECT_EQ(some.blocks.back().find("head")->offset, 0);
  // Fresh values do not depend on what is trained.
  for (size_t b = 0; b < all.blocks.size(); ++b)
    for (const TensorPlace& place : all.blocks[b].tensors)
      EXPECT_EQ(some.blocks[b].find(place.parameter.name)->number, place.number) << place.parameter.name;
}

TEST(TrainedTensors, AreRefusedWhereANameMatchesNothingOrAPartOfAMatrix) {
  const auto why = [](std::vector<std::string> names) {
    return refusal([&] { only(names).layout(nullptr); });
  };
  EXPECT_EQ(why({"model.layers", "model.norm", "embed_tokens"}), "") << "all of them";
  EXPECT_NE(why({"q_proj"})
                .find("layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight "
                      "and model.layers.0.self_attn.v_proj.weight, which are one parameter here"),
            std::string::npos)
      << why({"q_proj"});
  EXPECT_EQ(why({"q_proj", "k_proj", "v_proj"}), "");
  EXPECT_NE(why({"mlp", "modle.layers"}).find("did you mean \"model.layers\"?"), std::string::npos);
  EXPECT_NE(why({"lm_head"}).find("is tied to model.embed_tokens.weight"), std::string::npos);
  EXPECT_NE(why({"regex:nothing"}).find("such as"), std::string::npos);
}

TEST(TrainedTensors, TakeNoGradientAndNoStateOfTheOthers) {
  const Case all = only({}), layers = only({"model.layers"}), last = only({"layers.29"});
  const int64_t flat = layers.layout(nullptr).flat_elements, of_last = last.layout(nullptr).flat_elements;
  EXPECT_LT(30 * of_last - flat, 30 * kGranule);
  const Plan plan = layers.plan(), least = last.plan(), whole = all.plan();
  EXPECT_EQ(class_bytes(plan, "weights"), flat * 2);
  EXPECT_EQ(class_bytes(plan, "frozen weights"), layers.layout(nullptr).frozen_bytes);
  for (const auto& [one, elements] : {std::pair(&plan, flat), std::pair(&least, of_last)}) {
    EXPECT_EQ(class_bytes(*one, "gradients"), elements * 4);
    EXPECT_EQ(class_bytes(*one, "master"), elements * 2);
    EXPECT_EQ(class_bytes(*one, "second moment"), elements * 4);
    EXPECT_EQ(class_bytes(*one, "embedding rows"), 0);
  }
  EXPECT_GT(class_bytes(whole, "embedding rows"), 0);
  EXPECT_EQ(least.step.first_trained, 30);
  const auto told = std::ranges::find(least.choices, "trained parameters", &Choice::key);
  ASSERT_NE(told, least.choices.end());
  EXPECT_EQ(told->value, std::to_string(last.layout(nullptr).trainable_elements) + " of 134515008");
  EXPECT_EQ(told->reason, "train.only; no backward pass before block 29");
  // What one layer saves, and beside it a block input of each micro-batch: no more than a tenth of all.
  EXPECT_LT(least.arena.saved * 10, whole.arena.saved);
  EXPECT_EQ(plan.step.first_trained, 1);
  for (const Operation& op : make_schedule(least.step).operations)
    EXPECT_TRUE(op.unit >= 30 ||
                !(op.kind == OperationKind::kBackward || op.kind == OperationKind::kRecompute));
}

// No backward reads the input of a block below the lowest trained one.
TEST(TrainedTensors, HaveDiskSpaceForTheInputsOfBlocksWithABackward) {
  const auto disk_inputs = [](std::vector<std::string> names) {
    Case c = only(std::move(names));
    c.config.train.recompute = Recompute::kBlock;
    c.config.offload.activations = OffloadTier::kNvme;
    const Plan plan = c.plan();
    const PoolPlan& pool = plan.placement.pool(Pool::kActivations);
    EXPECT_GT(pool.off_device_bytes(TierId::kNvme), 0);
    EXPECT_EQ(array_name(plan.placement, c.layout(nullptr), Pool::kActivations,
                         static_cast<int64_t>(pool.bytes.size()) - 1),
              "input of head");
    return static_cast<int64_t>(pool.bytes.size()) / plan.placement.group;
  };
  EXPECT_EQ(disk_inputs({}), 31);
  EXPECT_EQ(disk_inputs({"model.layers"}), 31);
  EXPECT_EQ(disk_inputs({"layers.29"}), 4);  // two places in turns, blocks 30 and 31
}

TEST(TrainedTensors, MoveFromDiskWhetherTheyAreTrainedOrFrozen) {
  Case c = only({"regex:layers[.]2[0-9][.]"});
  c.config.offload.weights = OffloadTier::kNvme;
  const Plan plan = c.plan();
  const ModelLayout layout = c.layout(nullptr);
  const std::vector<ScheduleUnit> units = plan.placement.units();
  for (int64_t b = 1; b <= 30; ++b) {
    const BlockLayout& block = layout.blocks[static_cast<size_t>(b)];
    const bool trained = b > 20;
    EXPECT_EQ(units[static_cast<size_t>(b)].frozen, !trained) << b;
    EXPECT_EQ(plan.placement.pool(Pool::kWeights).bytes[static_cast<size_t>(b)],
              trained ? block.flat_elements * 2 : block.frozen_bytes);
  }
}

}  // namespace
}  // namespace lm
