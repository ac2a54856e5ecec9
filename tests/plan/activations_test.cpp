#include "plan/activations.h"

#include <gtest/gtest.h>

#include "kernels/kernels.h"
#include "plan/arena_walk.h"
#include "shapes.h"

namespace lm {
namespace {

TEST(ArenaWalk, RoundsAsTheArenaDoesAndKeepsItsHighWater) {
  ArenaWalk walk;
  walk.allocate(1);
  {
    const ArenaWalkFrame frame(walk);
    walk.allocate(300);
    walk.allocate(0);
    EXPECT_EQ(walk.mark(), 256 + 512);
  }
  EXPECT_EQ(walk.mark(), 256);
  walk.allocate(256);
  EXPECT_EQ(walk.mark(), 512);
  EXPECT_EQ(walk.high_water(), 768);
}

TEST(ArenaWalk, GivesWhatARealArenaGives) {
  Arena arena(DeviceType::kCpu, 1 << 16);
  ArenaWalk walk;
  for (const int64_t bytes : {1, 256, 257, 4000, 0, 511}) {
    arena.allocate(bytes);
    walk.allocate(bytes);
    ASSERT_EQ(walk.mark(), arena.mark());
  }
  arena.rewind(512);
  walk.rewind(512);
  arena.allocate(100);
  walk.allocate(100);
  EXPECT_EQ(walk.mark(), arena.mark());
  EXPECT_EQ(walk.high_water(), arena.high_water());
}

TEST(AttentionBound, CoversTheKernelsScratchClosely) {
  for (const int64_t head_dim : {8, 22, 32, 64, 80, 128, 256}) {
    for (const int64_t threads : {1, 2, 16}) {
      const int64_t forward = attention_forward_scratch(head_dim, threads, DType::kBF16);
      EXPECT_GE(attention_forward_bound(head_dim, threads), forward) << head_dim;
      for (const int64_t tokens : {1, 100, 4096}) {
        const int64_t backward = attention_backward_scratch(tokens, 9, 3, head_dim, threads, DType::kBF16);
        EXPECT_GE(attention_backward_bound(tokens, 3, head_dim, threads), backward) << head_dim;
        EXPECT_LE(attention_backward_bound(tokens, 3, head_dim, threads), backward + threads * 100'000);
      }
    }
  }
}

// Small enough for pencil and paper: fp32, T = 64 tokens, H = 64, F = 128, q 64, k and v 32 each, V = 1000.
ActivationShape small_shape(bool recompute) {
  return {.tokens = 64,
          .documents = 1,
          .row_chunk = 32,
          .recompute = recompute,
          .train_embedding = true,
          .dtype = DType::kF32,
          .gradient_dtype = DType::kF32,
          .device = DeviceType::kCuda,
          .threads = 1};
}

// Token, position, sample, rows with targets and these, two starts of documents: 322 numbers in one block.
constexpr int64_t kBatch = 6 * 256, kHidden = 64 * 64 * 4;
// rstd1, qkv, attention, lse, x_mid, rstd2, gate_up.
constexpr int64_t kSaved = 256 + 64 * 128 * 4 + kHidden + 2 * 64 * 4 + kHidden + 256 + 64 * 256 * 4;
// Gathered rows, normed rows, rstd, their gradient; of a chunk: three statistics, logits, dX
// in fp32 and one segment's part.
constexpr int64_t kHead = 2 * kHidden + 256 + kHidden + 3 * 256 + 32 * 1000 * 4 + 2 * 32 * 64 * 4;
// MLP: dh, normed, dnormed, a norm's column sums (as much as attention's dqkv, normed, dnormed).
constexpr int64_t kBackward = 64 * 128 * 4 + 2 * kHidden + 512;

TEST(ArenaNeed, EqualsAHandComputedStep) {
  const ModelSpec spec = make_spec({64, 128, 1, 2, 1, 32, 1000});
  const ArenaNeed need = arena_need(spec, nullptr, small_shape(false));
  EXPECT_EQ(need.saved, kHidden + kSaved + kHidden);
  EXPECT_EQ(need.logits, 32 * 1000 * 4);
  EXPECT_EQ(need.bytes, kBatch + kHidden + need.saved + kHead);
  EXPECT_EQ(need.bytes, 377'344);
}

TEST(ArenaNeed, EqualsAHandComputedStepWithRecomputation) {
  const ModelSpec spec = make_spec({64, 128, 2, 2, 1, 32, 1000});
  const ArenaNeed need = arena_need(spec, nullptr, small_shape(true));
  EXPECT_EQ(need.saved, 3 * kHidden);
  EXPECT_EQ(need.bytes, kBatch + kHidden + need.saved + kSaved + kBackward);
  EXPECT_EQ(need.bytes, 265'216);
}

TEST(ArenaNeed, SavesThePublishedBytesPerToken) {
  // Per token and layer in bf16: x_in, q, k, v, attention's output, x_mid, gate and up; in fp32 two rstd and
  // an lse per head. Recomputation keeps 2 H bytes, 65,536 for all layers of Llama-3.2-1B.
  ActivationShape shape{.tokens = 4096, .documents = 2, .row_chunk = 512};
  const int64_t layer = 2 * (2048 + 3072 + 2048 + 2048 + 16384) + 4 * (2 + 32);
  EXPECT_EQ(arena_need(llama_1b(), nullptr, shape).saved, 4096 * (16 * layer + 2 * 2048));
  shape.recompute = true;
  EXPECT_EQ(arena_need(llama_1b(), nullptr, shape).saved, 4096 * (65'536 + 2 * 2048));
}

TEST(ArenaNeed, GrowsWithTokensAndShrinksWithRecomputation) {
  const AdapterSpec lora = adapter_r16();
  for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
      int64_t last[2] = {0, 0};
      for (const int64_t tokens : {64, 100, 512, 2048, 8192}) {
        int64_t bytes[2];
        for (const bool recompute : {false, true}) {
          const ActivationShape shape{.tokens = tokens,
                                      .documents = 1,
                                      .row_chunk = 512,
                                      .recompute = recompute,
                                      .train_embedding = adapter == nullptr,
                                      .device = device,
                                      .threads = 2};
          const ArenaNeed need = arena_need(smollm2_135m(), adapter, shape);
          bytes[recompute] = need.bytes;
          EXPECT_LT(need.saved, need.bytes);
          EXPECT_GE(need.bytes, arena_need_forward(smollm2_135m(), adapter, shape));
          EXPECT_GT(need.bytes, last[recompute]);
          last[recompute] = need.bytes;
        }
        if (tokens >= 512) {
          EXPECT_LT(bytes[1], bytes[0]);
        }
      }
    }
  }
}

TEST(ArenaNeed, CountsWhatFamiliesAndAdaptersAdd) {
  const ActivationShape shape{.tokens = 1024, .documents = 1, .row_chunk = 512};
  ModelSpec spec = smollm2_135m();
  const int64_t plain = arena_need(spec, nullptr, shape).saved;
  const AdapterSpec lora = adapter_r16();
  // Seven adapters of rank 16 per layer, bf16.
  EXPECT_EQ(arena_need(spec, &lora, shape).saved, plain + 1024 * 30 * 7 * 16 * 2);
  for (LayerSpec& layer : spec.layers) layer.attention = AttentionKind::kGroupedNormed;
  // q and k before their norm, and an rstd per head.
  EXPECT_EQ(arena_need(spec, nullptr, shape).saved, plain + 1024 * 30 * ((576 + 192) * 2 + (9 + 3) * 4));
}

}  // namespace
}  // namespace lm
