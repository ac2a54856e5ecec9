// The memory of modules that are trained whole beside an adapter (lora.also).
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "plan/plan.h"
#include "shapes.h"

namespace lm {
namespace {

Case with_also(const ModelSpec& spec, const std::vector<std::string>& also) {
  Case out{.spec = spec};
  out.config.train.method = Method::kLora;
  out.lora.also = also;
  return out;
}

TEST(WholeModulesPlan, ATrainedEmbeddingHasNoFrozenCopyAndFullFineTuningsState) {
  const Case plain = with_also(smollm2_135m(), {}), whole = with_also(smollm2_135m(), {"model.embed_tokens"});
  const int64_t table = 49152LL * 576;
  const ModelLayout before = plain.layout(&plain.lora), after = whole.layout(&whole.lora);
  EXPECT_EQ(after.trainable_elements, before.trainable_elements + table);
  EXPECT_EQ(after.frozen_elements, before.frozen_elements - table);
  const Plan lora = plain.plan(), both = whole.plan();
  const int64_t more = after.flat_elements - before.flat_elements;
  EXPECT_EQ(more, table);  // whole granules
  for (const auto& [name, bytes] : std::vector<std::pair<const char*, int64_t>>{
           {"weights", 2}, {"gradients", 4}, {"master", 2}, {"first moment", 4}, {"second moment", 4}}) {
    EXPECT_EQ(class_bytes(both, name), class_bytes(lora, name) + more * bytes) << name;
  }
  EXPECT_EQ(class_bytes(both, "frozen weights"), class_bytes(lora, "frozen weights") - table * 2);
  // 8 sequences of 2048 tokens.
  EXPECT_EQ(class_bytes(both, "embedding rows"), 16384LL * 576 * 4);
  EXPECT_EQ(class_bytes(lora, "embedding rows"), 0);
  EXPECT_GT(both.peak.host, lora.peak.host + table * 10);
}

TEST(WholeModulesPlan, RowsOfTokensCostTheirOwnState) {
  Case plain = with_also(smollm2_135m(), {}), rows = with_also(smollm2_135m(), {});
  rows.lora.tokens = {7, 8, 49151};
  const ModelLayout before = plain.layout(&plain.lora), after = rows.layout(&rows.lora);
  EXPECT_EQ(after.trainable_elements, before.trainable_elements + 3 * 576);
  EXPECT_EQ(after.frozen_elements, before.frozen_elements);
  const TensorPlace* const place = after.blocks.front().find("embed.tokens");
  ASSERT_NE(place, nullptr);
  EXPECT_EQ(after.blocks.front().beside(*after.blocks.front().find("embed"), 0, TrainableRole::kTokenRows),
            place);
  const Plan plan = rows.plan();
  EXPECT_EQ(class_bytes(plan, "embedding rows"), 3 * 576 * 4);
  EXPECT_EQ(class_bytes(plan, "first moment"), after.flat_elements * 4);
  EXPECT_LT(plan.peak.host, plain.plan().peak.host + 4 * kMiB);
}

TEST(WholeModulesPlan, AnAdapterOfTheEmbeddingSumsItsRowsAlone) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  c.config.train.method = Method::kLora;
  const Plan plain = c.plan();
  c.lora.targets.emplace_back("embed_tokens");
  const ModelLayout layout = c.layout(&c.lora);
  const TensorPlace *const a = layout.blocks.front().find("embed.lora_A"), *const b =
                                                                               layout.blocks.front().find(
                                                                                   "embed.lora_B");
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_EQ(a->parameter.rows, c.lora.r);
  EXPECT_EQ(b->parameter.elements(), 128256 * c.lora.r);
  const TensorPlace& table = *layout.blocks.front().find("embed");
  EXPECT_TRUE(table.frozen);
  EXPECT_EQ(layout.blocks.front().beside(table, 0, TrainableRole::kLoraB), b);
  const Plan plan = c.plan();
  const int64_t tokens = std::min<int64_t>(128256, c.config.train.global_batch * c.config.data.max_length);
  EXPECT_EQ(class_bytes(plan, "embedding rows"), tokens * c.lora.r * 4);
  EXPECT_EQ(class_bytes(plain, "embedding rows"), 0);
  EXPECT_TRUE(plan.fits);
}

TEST(WholeModulesPlan, AnAdapterOfTheHeadKeepsItWhole) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  c.config.train.method = Method::kLora;
  c.config.offload.weights = OffloadTier::kHost;
  EXPECT_GT(c.plan().placement.head_segments(), 0);
  c.lora.targets.emplace_back("lm_head");
  const ModelLayout layout = c.layout(&c.lora);
  EXPECT_TRUE(layout.blocks.back().trains("head.lora_B"));
  const Plan plan = c.plan();
  EXPECT_EQ(plan.placement.head_segments(), 0);
  EXPECT_TRUE(plan.fits);
}

TEST(WholeModulesPlan, AnUntiedHeadIsTrainedInSegmentsBesideOffloadedLayers) {
  Case c = with_also(llama_8b(), {"lm_head", "model.norm"});
  c.machine = gpu_machine("H200");
  c.device = DeviceType::kCuda;
  c.config.offload.weights = OffloadTier::kHost;
  const ModelLayout layout = c.layout(&c.lora);
  const TensorPlace* const head = layout.blocks.back().find("head");
  ASSERT_NE(head, nullptr);
  EXPECT_FALSE(head->frozen);
  EXPECT_EQ(head->offset, 0);
  EXPECT_TRUE(layout.blocks.back().trains("norm"));
  EXPECT_FALSE(layout.blocks.front().trains("embed"));
  int64_t of_segments = 0;
  for (const Unit& unit : layout.units(true))
    if (unit.segment()) of_segments += unit.elements;
  EXPECT_EQ(of_segments, 128256LL * 4096);
  const Plan plan = c.plan();
  EXPECT_TRUE(plan.fits);
  // What is trained stays on the device; what moves is the layers' frozen weights.
  EXPECT_EQ(class_bytes(plan, "weights"), layout.flat_elements * 2);
}

}  // namespace
}  // namespace lm
