// Attention in chunks, which GPUs use, on the CPU against the fp64 reference: its results do not depend on
// the device. Chunks of few scores, so that a small problem has several.
#include <array>
#include <cmath>

#include "kernels/attention_chunks.h"
#include "kernels/counting.h"
#include "kernels/runtime.h"
#include "tests/kernels/attention_problem.h"

namespace lm::attention {
namespace {

// Scores of a chunk: one token of one key head, a few tokens of all or some of them, whole documents.
constexpr int64_t kScores[] = {1, 600, 5000, 40000, kChunkScores};

Shape capped(Shape shape, float softcap) {
  shape.softcap = softcap;
  return shape;
}

StreamView stream() {
  static const StreamView kStream = start_torch(DeviceType::kCpu, 1, true);
  return kStream;
}

void run_forward(Problem& p, int64_t scores, int64_t past = 0) {
  p.forward_by([&](const AttentionForward& args) { attention_forward_chunks(args, stream(), scores); }, past);
}
void run_backward(Problem& p, int64_t scores) {
  p.backward_by([&](const AttentionBackward& args) { attention_backward_chunks(args, stream(), scores); });
}

void expect_chunks(const Shape& shape) {
  Problem problem(shape);
  const Reference reference(problem);
  for (const int64_t scores : kScores) {
    Problem p(shape);
    run_forward(p, scores);
    run_backward(p, scores);
    expect_reference(p, reference, "chunks of " + std::to_string(scores));
  }
}

class AttentionChunks : public testing::TestWithParam<DType> {};

TEST_P(AttentionChunks, EqualTheReference) {
  const std::vector<int32_t> lengths{1, 2, 3, 40, 130};
  for (const int64_t window : {0, 1, 5, 64, 100}) {
    for (const float softcap : {0.f, 2.f}) {
      expect_chunks(capped({4, 2, 16, window, lengths, GetParam()}, softcap));
      expect_chunks(capped({3, 1, 34, window, lengths, GetParam()}, softcap));
    }
  }
  expect_chunks(capped({5, 5, 8, 0, lengths, GetParam()}, 2));
}

TEST_P(AttentionChunks, OfWideHeadsEqualTheReference) {
  for (const int64_t head_dim : {200, 320, 512}) {
    expect_chunks({4, 2, head_dim, 0, {1, 30, 70}, GetParam()});
    expect_chunks(capped({2, 1, head_dim, 20, {1, 30, 70}, GetParam()}, 2));
  }
}

TEST_P(AttentionChunks, OfADocumentThatGoesOnEqualTheReference) {
  for (const int64_t window : {0, 1, 70}) {
    const Shape shape = capped({6, 2, 32, window, {150}, GetParam()}, 2);
    Problem problem(shape);
    const Reference reference(problem);
    for (const int64_t scores : {int64_t{600}, kChunkScores})
      expect_going_on(shape, reference, "chunks of " + std::to_string(scores),
                      [&](Problem& p, int64_t past) { run_forward(p, scores, past); });
  }
}

// The lse of a run of documents lies by itself, as the library's kernels have it.
TEST_P(AttentionChunks, OfSeveralRunsEqualThoseOfOne) {
  const Shape shape = capped({4, 2, 16, 0, {5, 40, 1, 30}, GetParam()}, 2);
  const int64_t tokens = shape.tokens();
  const DocumentRun runs[] = {{.first = 0, .tokens = 45, .count = 2, .longest = 40},
                              {.first = 45, .tokens = 31, .count = 2, .longest = 30}};
  const auto in_runs = [&](auto args) {
    args.documents.runs = runs;
    args.documents.run_count = 2;
    return args;
  };
  Problem one(shape), two(shape);
  run_forward(one, 600);
  two.forward_by(
      [&](const AttentionForward& args) { attention_forward_chunks(in_runs(args), stream(), 600); });
  EXPECT_EQ(one.out.bits(), two.out.bits());
  for (const DocumentRun& run : runs) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      EXPECT_EQ(one.lse.bits(h * tokens + run.first, run.tokens),
                two.lse.bits(shape.heads * run.first + h * run.tokens, run.tokens))
          << h;
    }
  }
  run_backward(one, 600);
  two.backward_by(
      [&](const AttentionBackward& args) { attention_backward_chunks(in_runs(args), stream(), 600); });
  EXPECT_EQ(one.dqkv.bits(), two.dqkv.bits());
}

TEST_P(AttentionChunks, OfPackedDocumentsEqualThoseOfSeparateCalls) {
  const Shape shape = capped({3, 1, 16, 50, {65, 1, 130}, GetParam()}, 2);
  Problem packed(shape);
  run_forward(packed, 5000);
  run_backward(packed, 5000);
  for (size_t document = 0; document < shape.lengths.size(); ++document) {
    Shape alone = shape;
    alone.lengths = {shape.lengths[document]};
    Problem p(alone);
    const int64_t begin = packed.start[document];
    for (int64_t i = 0; i < p.qkv.size(); ++i) p.qkv.set(i, packed.qkv.get(begin * shape.stride() + i));
    for (int64_t i = 0; i < p.dout.size(); ++i)
      p.dout.set(i, packed.dout.get(begin * shape.q_elements() + i));
    run_forward(p, 5000);
    run_backward(p, 5000);
    EXPECT_EQ(p.out.bits(), packed.out.bits(begin * shape.q_elements(), p.out.size()));
    EXPECT_EQ(p.dqkv.bits(), packed.dqkv.bits(begin * shape.stride(), p.dqkv.size()));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionChunks, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

ChunkShape large_shape(int64_t tokens) {
  return {.tokens = tokens, .keys = tokens, .heads = 32, .kv_heads = 8, .head_dim = 256, .backward = true};
}

// Scores stay below their bound whatever the length; only sums of dk and dv grow with it.
TEST(ChunkMemory, IsBoundedAndGrowsWithTokens) {
  int64_t before = 0;
  for (int64_t tokens = 1; tokens <= 1 << 20; tokens = tokens * 3 / 2 + 1) {
    ChunkShape shape = large_shape(tokens);
    shape.capped = true;
    const ChunkMemory memory = chunk_memory(shape);
    EXPECT_LE(memory.scores.bytes, 4 * kChunkScores) << tokens;
    EXPECT_LE(memory.product.bytes, 4 * kChunkScores) << tokens;
    EXPECT_GE(memory.bytes, before) << tokens;
    before = memory.bytes;
    const Chunk chunk = chunk_of(shape, tokens);
    EXPECT_LE(chunk.kv_heads * 4 * chunk.tokens * std::max<int64_t>(tokens, 256), kChunkScores) << tokens;
    EXPECT_TRUE(tokens > 16384 || chunk.tokens >= 100) << tokens << ": " << chunk.tokens;
  }
}

// As a plan for an absurd micro-batch asks.
TEST(ChunkMemory, OfMoreTokensThanAnyMachineHoldsIsANumber) {
  const ChunkMemory memory = chunk_memory(large_shape(int64_t{1} << 40));
  EXPECT_EQ(memory.dk.bytes, int64_t{1} << 50);
  EXPECT_GT(memory.bytes, 2 * memory.dk.bytes);
}

TEST(ChunkMemory, OfFewTokensIsSmall) {
  EXPECT_LT(chunk_memory(large_shape(16)).bytes, 2 << 20);
}

// What the plan takes a call for.
template <class Args>
Cost cost_of(const Args& args, DeviceType device) {
  Counts counts;
  const Kernels& kernels = counting_kernels(device);
  const StreamView stream = counting_stream(counts, device, 1);
  if constexpr (std::is_same_v<Args, AttentionForward>)
    kernels.attention_forward(args, stream);
  else
    kernels.attention_backward(args, stream);
  return counts.cost;
}

TEST(CostOfAttention, InChunksCountsWhatIsHiddenAndPassesOverScores) {
  const AttentionForward flash{.documents = {.count = 2},
                               .tokens = 4096,
                               .heads = 16,
                               .kv_heads = 8,
                               .head_dim = 128,
                               .dtype = DType::kBF16};
  AttentionForward chunks = flash;
  chunks.softcap = 50;
  const double scores = 2 * 16 * 2048. * 2048 / 2;
  EXPECT_EQ(cost_of(flash, DeviceType::kCuda).pass_bytes, 0);
  EXPECT_EQ(cost_of(flash, DeviceType::kCuda).attention_flops, 4 * scores * 128);
  const Cost cost = cost_of(chunks, DeviceType::kCuda);
  // 256 tokens at a time: half a row more for each, of a mean of 1024.
  EXPECT_EQ(cost.attention_flops, 4 * scores * 1.125 * 128);
  EXPECT_EQ(cost.pass_bytes, 13 * 4 * scores * 1.125);
  EXPECT_EQ(cost.calls, 2 * 8 * 16);
  EXPECT_EQ(cost_of(chunks, DeviceType::kCpu).attention_flops, 4 * scores * 128);
  EXPECT_EQ(cost_of(chunks, DeviceType::kCpu).pass_bytes, 0);
  AttentionForward wide = flash;
  wide.head_dim = 512;
  EXPECT_GT(cost_of(wide, DeviceType::kCuda).pass_bytes, 0);
  const AttentionBackward backward{.documents = {.count = 2},
                                   .tokens = 4096,
                                   .heads = 16,
                                   .kv_heads = 8,
                                   .head_dim = 128,
                                   .softcap = 50,
                                   .dtype = DType::kBF16};
  EXPECT_EQ(cost_of(backward, DeviceType::kCuda).attention_flops, 10 * scores * 1.125 * 128);
  EXPECT_GT(cost_of(backward, DeviceType::kCuda).pass_bytes, 2 * cost.pass_bytes);
}

TEST(AttentionOfTheLibrary, HasNoSoftCapsAndNoHeadsBeyond256) {
  EXPECT_TRUE(library_attends(256, 0));
  EXPECT_FALSE(library_attends(257, 0));
  EXPECT_FALSE(library_attends(64, 50));
  for (const int64_t head_dim : {193, 208, 224}) EXPECT_TRUE(wants_shared_memory(head_dim));
  for (const int64_t head_dim : {192, 225, 256}) EXPECT_FALSE(wants_shared_memory(head_dim));
  for (const auto& [major, minor] : std::vector<std::array<int, 2>>{{8, 6}, {8, 7}, {8, 9}, {12, 0}, {12, 1}})
    EXPECT_TRUE(has_little_shared_memory(major, minor)) << major << minor;
  for (const auto& [major, minor] : std::vector<std::array<int, 2>>{{8, 0}, {9, 0}, {10, 0}, {10, 3}})
    EXPECT_FALSE(has_little_shared_memory(major, minor)) << major << minor;
}

}  // namespace
}  // namespace lm::attention
