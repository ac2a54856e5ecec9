// Frozen experts that are fetched once the router has chosen them: the bits are the resident run's, and fewer
// bytes are read than of whole blocks. Built for the CPU, which stands in for a GPU where a run is
// `slots_on_device`, and for a GPU.
#include "train/routed_experts.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/bytes.h"
#include "offloaded_run.h"
#include "plan/weight_rows.h"
#include "tests/support/device_test.h"
#include "tests/support/family_shapes.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

using namespace offloaded_run;

class RoutedExpertsTest : public DeviceTest {};

// The base of an adapter on the attention, off the device.
Variant of_base(EncodingKind base) {
  Variant run;
  run.family = Family::kManyExperts;
  run.lora = true, run.base = base;
  run.micro_batches = 2, run.steps = 5;
  run.weights = true;
  return run;
}

// Bytes that fetches of whole blocks read in the steps and the evaluation of a run, on a disk.
int64_t streamed_bytes(const Training& training, const Variant& run) {
  const StepConfig& step = training.plan().step;
  StepLists lists(step);
  int64_t bytes = 0;
  const auto count = [&](const StepSchedule& list) {
    for (const Operation& op : list.operations)
      if (op.kind == OperationKind::kFetch && op.pool == Pool::kWeights)
        bytes += round_up(training.plan().placement.pool(Pool::kWeights).bytes[static_cast<size_t>(op.array)],
                          kChecksumChunk);
  };
  for (int64_t s = 0; s < run.steps; ++s) count(lists.step(step.micro_batches));
  return bytes;
}

TEST_F(RoutedExpertsTest, GiveTheBitsOfTheResidentRunAndReadLess) {
  for (const EncodingKind base : {EncodingKind::kPlain, EncodingKind::kNf4}) {
    for (const int kind : {0, 1, 2, 3, 4, 5}) {
      Variant run = of_base(base);
      run.group = kind % 2 == 0 ? 2 : 1;
      run.recompute = kind == 0 || kind == 3;
      run.activations = kind == 3;
      run.slots_on_device = kind >= 2;
      run.host = kind == 3 ? 1 : kind == 4 ? 2 : 0;
      run.mixed = kind == 5;
      run.verify = kind != 1;
      SCOPED_TRACE(run.text());
      Training training(run);
      const int64_t loaded = training.rank().off_device().counters().read_bytes;
      const Outcome got = training.run();
      expect_same(run, got);
      if (run.host > 0 || run.mixed || run.activations) continue;
      const int64_t read = training.rank().off_device().counters().read_bytes - loaded;
      EXPECT_GT(read, 0);
      // Some 39 % of the experts (group 2) or 31 % and less, in whole chunks, and what all tokens meet.
      const double most = base == EncodingKind::kPlain ? 0.65 : 0.85;
      EXPECT_LT(static_cast<double>(read), most * static_cast<double>(streamed_bytes(training, run)));
    }
  }
}

// The list's fetch and the routers' together are the block: nothing of it is in both, or in neither.
TEST(ExpertParts, AndWhatAllTokensMeetAreTheWholeBlock) {
  ModelSpec plain = llama_spec({.layers = 2}), sinks = plain;
  like_qwen3_moe(plain, 6, 2);
  like_gpt_oss(sinks, 4, 2);
  for (const ModelSpec& spec : {plain, sinks}) {
    for (const Encoding* const encoding :
         {static_cast<const Encoding*>(nullptr), &encoding_of(EncodingKind::kNf4)}) {
      const AdapterSpec lora{.r = 4, .alpha = 8, .targets = {"q_proj"}};
      const ModelLayout layout = make_layout(spec, &lora, DType::kBF16, encoding);
      const BlockLayout& block = layout.blocks[2];
      const auto& experts = *spec.layer(1).find<ExpertsSpec>();
      const ExpertParts parts = expert_parts(experts, 1, block);
      ASSERT_EQ(std::ssize(parts.experts), experts.experts);
      std::vector<ByteRange> all = parts.others;
      EXPECT_LE(all.size(), 2U) << "each is a request of its own";
      int64_t of_experts = 0;
      for (const std::vector<ByteRange>& expert : parts.experts) {
        all.insert(all.end(), expert.begin(), expert.end());
        for (const ByteRange& range : expert) of_experts += range.bytes;
      }
      std::ranges::sort(all, {}, &ByteRange::begin);
      int64_t end = 0;
      for (const ByteRange& range : all) {
        EXPECT_EQ(range.begin, end);
        end = range.end();
      }
      EXPECT_EQ(end, block.frozen_bytes);
      EXPECT_GE(of_experts, expert_bytes(block).frozen);
      // One expert's matrix lies in its own parts.
      const TensorPlace* const down = block.find("layers.1.experts.3.down");
      ASSERT_NE(down, nullptr);
      EXPECT_TRUE(std::ranges::any_of(parts.experts[3], [&](const ByteRange& range) {
        return range.begin <= down->offset && down->offset < range.end();
      }));
    }
  }
  // Experts that are trained have nothing to fetch so.
  const ModelLayout full = make_layout(plain, nullptr, DType::kBF16, nullptr);
  EXPECT_TRUE(expert_parts(*plain.layer(0).find<ExpertsSpec>(), 0, full.blocks[1]).experts.empty());
}

}  // namespace
}  // namespace lm
