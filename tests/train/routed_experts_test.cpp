// Frozen experts that are fetched once the router has chosen them: the bits are the resident run's, and fewer
// bytes are read than of whole blocks. Built for the CPU, which stands in for a GPU where a run is
// `slots_on_device`, and for a GPU.
#include "train/routed_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "kernels/library.h"
#include "memory_store.h"
#include "offloaded_run.h"
#include "plan/weight_rows.h"
#include "tests/support/counts.h"
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
  run.layers = 2, run.micro_batches = 2, run.steps = 5;
  run.weights = true, run.slots = 1;
  return run;
}

// Bytes that a list's fetches of whole units read.
int64_t fetched_whole(const Training& training, const StepSchedule& list) {
  const std::vector<int64_t>& bytes = training.plan().placement.pool(Pool::kWeights).bytes;
  int64_t sum = 0;
  for (const Operation& op : list.operations)
    if (op.kind == OperationKind::kFetch && op.pool == Pool::kWeights)
      sum += round_up(bytes[static_cast<size_t>(op.array)], kChecksumChunk);
  return sum;
}

// The same of all steps of a run.
int64_t streamed_bytes(const Training& training, const Variant& run) {
  StepLists lists(training.plan().step);
  int64_t bytes = 0;
  for (int64_t s = 0; s < run.steps; ++s) bytes += fetched_whole(training, lists.step(run.micro_batches));
  return bytes;
}

TEST_F(RoutedExpertsTest, GiveTheBitsOfTheResidentRunAndReadLess) {
  for (const EncodingKind base : {EncodingKind::kPlain, EncodingKind::kNf4}) {
    for (const int kind : {0, 1, 2, 3, 4, 5}) {
      // In the short tier four of them, each of one base: disk and host memory, slots here and on the device.
      // A GPU's are always there: plain ones then come from host memory, too.
      const int plain = device() == DeviceType::kCuda ? 3 : 2;
      const bool short_tier =
          base == EncodingKind::kNf4 ? kind == 1 || kind == 4 : kind == 0 || kind == plain;
      if (!test::full_counts() && !short_tier) continue;
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
      // Some 31 % of the experts, of groups of one 17 %, in whole chunks: of plain ones a chunk has two, of
      // nf4 ones four; and what all tokens meet.
      const double most = base == EncodingKind::kPlain ? 0.65 : 0.85;
      EXPECT_LT(static_cast<double>(read), most * static_cast<double>(streamed_bytes(training, run)));
    }
  }
}

// What steps wait for by their lists: a forward pass for what its tokens choose, another pass where the block
// has been fetched since its micro-batch asked last.
class ExpectedWaits {
 public:
  explicit ExpectedWaits(int64_t layers) : layers_(layers) {}
  // Of a step, after those before it.
  int64_t of(const StepSchedule& list) {
    int64_t waits = 0;
    for (const Operation& op : list.operations) {
      if (op.kind == OperationKind::kFetch && op.pool == Pool::kWeights) ++fetched_[op.array];
      if (!computes(op.kind) || op.unit < 1 || op.unit > layers_) continue;
      int64_t& asked = asked_[{op.unit, op.micro}];
      if (op.kind != OperationKind::kForward && asked == fetched_[op.unit]) continue;
      asked = fetched_[op.unit];
      ++waits;
    }
    return waits;
  }

 private:
  int64_t layers_;
  std::map<int64_t, int64_t> fetched_;                    // how often, of each unit
  std::map<std::pair<int64_t, int64_t>, int64_t> asked_;  // by unit and micro-batch: after which fetch
};

TEST_F(RoutedExpertsTest, EachMicroBatchWaitsOnceAfterAFetchOfItsBlock) {
  for (const int kind : {0, 1, 2, 3}) {
    // On the emulator a step takes seconds: there the one in which most happens.
    if (!test::full_counts() && device() == DeviceType::kCuda && kind != 3) continue;
    Variant run = of_base(EncodingKind::kPlain);
    run.layers = kind < 2 ? 2 : 4;
    run.micro_batches = kind == 0 ? 1 : 2;
    run.group = kind == 3 ? 2 : 1;
    run.recompute = kind != 2;
    run.slots = kind < 2 ? 1 : 2;
    run.slots_on_device = kind == 1;
    SCOPED_TRACE(run.text());
    Training training(run);
    StepLists lists(training.plan().step);
    ExpectedWaits expected(run.layers);
    for (int64_t s = 1; s <= 3; ++s) {
      const int64_t waits = expected.of(lists.step(run.micro_batches));
      EXPECT_EQ(training.step(s).routed.waits, waits) << "step " << s;
      // Of six passes: backward finds what recomputation has brought.
      if (kind == 0) {
        EXPECT_LE(waits, 4);
      }
    }
  }
}

// Bytes of the chunks that parts of an array touch.
int64_t chunk_bytes(const std::vector<ByteRange>& parts) {
  std::set<int64_t> chunks;
  for (const ByteRange& part : parts)
    for (int64_t c = part.begin / kChecksumChunk; c * kChecksumChunk < part.end(); ++c) chunks.insert(c);
  return std::ssize(chunks) * kChecksumChunk;
}

// Each byte is read once after a fetch: by the list what all tokens meet, and by the routers what is missing.
TEST_F(RoutedExpertsTest, AreCountedByTheBytesThatTheyRead) {
  for (const int64_t group : {1, 2}) {
    Variant run = of_base(EncodingKind::kPlain);
    run.group = group;
    run.recompute = group == 2;
    run.verify = false;  // nothing is read twice
    SCOPED_TRACE(run.text());
    Training training(run);
    ModelSpec spec = llama_spec({.layers = run.layers});
    like_qwen3_moe(spec, 256, 1);
    const std::vector<int64_t>& bytes = training.plan().placement.pool(Pool::kWeights).bytes;
    const auto fetched = [&](const StepSchedule& list) {
      int64_t sum = 0;
      for (const Operation& op : list.operations) {
        if (op.kind != OperationKind::kFetch || op.pool != Pool::kWeights) continue;
        const auto u = static_cast<size_t>(op.array);
        const bool routed = op.array >= 1 && op.array <= run.layers;
        sum += routed ? chunk_bytes(expert_parts(*spec.layer(op.array - 1).find<ExpertsSpec>(), op.array - 1,
                                                 training.layout().blocks[u])
                                        .others)
                      : round_up(bytes[u], kChecksumChunk);
      }
      return sum;
    };
    const auto read_bytes = [&] { return training.rank().off_device().counters().read_bytes; };
    const int64_t before = read_bytes();
    StepLists lists(training.plan().step);
    int64_t by_list = 0, by_routers = 0;
    for (int64_t s = 1; s <= 3; ++s) {
      by_list += fetched(lists.step(run.micro_batches));
      const RoutedCounts routed = training.step(s).routed;
      EXPECT_GT(routed.bytes, 0);
      by_routers += routed.bytes;
    }
    training.flush();
    EXPECT_EQ(read_bytes() - before, by_list + by_routers);
  }
}

int64_t dequantized = 0;  // matrices' parts

const Kernels& counting_kernels() {
  static const Kernels kernels = [] {
    Kernels out = library_kernels(device());
    out.materialise = [](const Materialise& args, StreamView stream) {
      ++dequantized;
      library_kernels(device()).materialise(args, stream);
    };
    return out;
  }();
  return kernels;
}

// On a GPU the host does not know which experts have rows, but which ones it has fetched. On the CPU no other
// expert is dequantized wherever they are.
TEST_F(RoutedExpertsTest, NoOtherExpertIsDequantized) {
  Variant far = of_base(EncodingKind::kNf4);
  far.micro_batches = 1;
  far.kernels = &counting_kernels();
  Variant near = far;
  near.weights = false;
  Training resident(near), training(far);
  for (int64_t s = 1; s <= 2; ++s) {
    dequantized = 0;
    const double want = resident.step(s).loss;
    const int64_t all = std::exchange(dequantized, 0);
    EXPECT_EQ(training.step(s).loss, want);
    EXPECT_GT(dequantized, 0);
    if (device() == DeviceType::kCpu) {
      EXPECT_EQ(dequantized, all);
    } else {
      EXPECT_LT(dequantized, all / 2) << "a micro-batch meets 17 % of the experts";
    }
  }
}

Batch one_token() {
  return {.token = {7}, .position = {0}, .target = {9}, .sample = {0}, .document_start = {0, 1}};
}

// A pass decides by its own tokens: those of this model's steps meet all experts, one token meets two of
// five.
TEST_F(RoutedExpertsTest, AnEvaluationOfOneTokenReadsWhatItMeets) {
  Variant run;
  run.family = Family::kExperts;
  run.lora = true;
  Variant far = run;
  far.weights = true;
  Training resident(run), training(far);
  const Batch one = one_token();
  const auto read_bytes = [&] { return training.rank().off_device().counters().read_bytes; };
  const StepConfig& step = training.plan().step;
  int64_t before = read_bytes();
  EXPECT_EQ(training.step(1).loss, resident.step(1).loss);
  EXPECT_GE(read_bytes() - before, fetched_whole(training, StepLists(step).step(1))) << "whole blocks";
  training.flush();
  before = read_bytes();
  EXPECT_EQ(training.train_step().evaluate(one).nll, resident.train_step().evaluate(one).nll);
  const int64_t read = read_bytes() - before;
  // Of each layer three experts or more stay where they are: 9 KiB each, less a chunk at both ends.
  EXPECT_LE(read, fetched_whole(training, StepLists(step).evaluation().list) - run.layers * kChecksumChunk);
  EXPECT_GT(read, 0);
}

// Counts how often it is asked for parts; they are there.
class AskedStore : public MemoryStore {
 public:
  AskedStore(const LocalStoreSetup& setup, Calls& calls, int64_t& times)
      : MemoryStore(setup, calls), times_(times) {}
  bool fetches_parts() const override { return true; }
  int64_t bring(int64_t /*array*/, std::span<const ByteRange> /*parts*/) override {
    ++times_;
    return 0;
  }

 private:
  int64_t& times_;
};

// On a GPU who asks waits for the router first.
TEST_F(RoutedExpertsTest, OfWholeBlocksNobodyAsksForExperts) {
  Variant run;
  run.family = Family::kExperts;
  run.lora = run.weights = true;
  MemoryStore::Calls calls;
  int64_t asked = 0;
  Training training(run, {}, [&](Pool, const LocalStoreSetup& setup) {
    return std::make_unique<AskedStore>(setup, calls, asked);
  });
  training.step(1);
  EXPECT_EQ(asked, 0);
  training.train_step().evaluate(one_token());
  EXPECT_EQ(asked, run.layers);
  training.step(2);
  EXPECT_EQ(asked, run.layers) << "a step after an evaluation fetches whole blocks again";
}

// The list's fetch and the routers' together are the block: nothing of it is in both, or in neither.
TEST(ExpertParts, AndWhatAllTokensMeetAreTheWholeBlock) {
  ModelSpec plain = llama_spec({.layers = 2}), sinks = plain, beside = plain;
  like_qwen3_moe(plain, 6, 2);
  like_gpt_oss(sinks, 4, 2);
  like_gemma4_moe(beside, 6, 2);
  for (const ModelSpec& spec : {plain, sinks, beside}) {
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
