// What a rehearsal says of the arena, against pencil and paper and published figures; against the arena that
// a real step fills: arena_test.
#include "plan/rehearse.h"

#include <gtest/gtest.h>

#include "shapes.h"

namespace lm {
namespace {

struct Rehearsed {
  ModelSpec spec;
  const AdapterSpec* adapter = nullptr;
  DType dtype = DType::kBF16;
  ModelLayout layout = make_layout(spec, adapter, dtype);
  PassShape shape{.spec = spec, .layout = layout, .adapter = adapter, .dtype = dtype};
  ArenaNeed need(int64_t tokens, int64_t documents = 1) const { return arena_need(shape, tokens, documents); }
};

// Small enough for pencil and paper: fp32, T = 64 tokens, H = 64, F = 128, q 64, k and v 32 each, V = 1000.
ArenaNeed small_need(int64_t layers, bool recompute) {
  Rehearsed r{.spec = make_spec({64, 128, layers, 2, 1, 32, 1000}), .dtype = DType::kF32};
  r.shape.row_chunk = 32;
  r.shape.recompute = recompute;
  r.shape.device = DeviceType::kCuda;
  return r.need(64);
}

// Token, position, sample, rows with targets and these (the last token has none), two starts of documents:
// 320 numbers in one block.
constexpr int64_t kBatch = 5 * 256, kHidden = 64 * 64 * 4, kPicked = 63 * 64 * 4;
// rstd1, qkv, attention, lse, x_mid, rstd2, gate_up.
constexpr int64_t kSaved = 256 + 64 * 128 * 4 + kHidden + 2 * 64 * 4 + kHidden + 256 + 64 * 256 * 4;
// Gathered rows, normed rows, rstd, their gradient; of a chunk: three statistics, logits, dX
// in fp32 and one segment's part.
constexpr int64_t kHead = 3 * kPicked + 256 + 3 * 256 + 32 * 1000 * 4 + 2 * 32 * 64 * 4;
// MLP: dh, normed, dnormed, a norm's column sums (as much as attention's dqkv, normed, dnormed).
constexpr int64_t kBackward = 64 * 128 * 4 + 2 * kHidden + 512;

TEST(ArenaNeed, EqualsAHandComputedStep) {
  const ArenaNeed need = small_need(1, false);
  EXPECT_EQ(need.saved, kHidden + kSaved + kHidden);
  EXPECT_EQ(need.logits, 32 * 1000 * 4);
  EXPECT_EQ(need.bytes, kBatch + kHidden + need.saved + kHead);
  EXPECT_EQ(need.bytes, 376'320);
}

TEST(ArenaNeed, EqualsAHandComputedStepWithRecomputation) {
  const ArenaNeed need = small_need(2, true);
  EXPECT_EQ(need.saved, 3 * kHidden);
  EXPECT_EQ(need.bytes, kBatch + kHidden + need.saved + kSaved + kBackward);
  EXPECT_EQ(need.bytes, 264'960);
}

TEST(ArenaNeed, SavesThePublishedBytesPerToken) {
  // Per token and layer in bf16: x_in, q, k, v, attention's output, x_mid, gate and up; in fp32 two rstd and
  // an lse per head. Recomputation keeps 2 H bytes, 65,536 for all layers of Llama-3.2-1B.
  Rehearsed r{.spec = llama_1b()};
  const int64_t layer = 2 * (2048 + 3072 + 2048 + 2048 + 16384) + 4 * (2 + 32);
  EXPECT_EQ(r.need(4096, 2).saved, 4096 * (16 * layer + 2 * 2048));
  r.shape.recompute = true;
  EXPECT_EQ(r.need(4096, 2).saved, 4096 * (65'536 + 2 * 2048));
}

TEST(ArenaNeed, GrowsWithTokensAndShrinksWithRecomputation) {
  const AdapterSpec lora = adapter_r16();
  for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
      Rehearsed r{.spec = smollm2_135m(), .adapter = adapter};
      r.shape.device = device;
      r.shape.threads = 2;
      int64_t last[2] = {0, 0};
      for (const int64_t tokens : {64, 100, 512, 2048, 8192}) {
        int64_t bytes[2];
        for (const bool recompute : {false, true}) {
          r.shape.recompute = recompute;
          const ArenaNeed need = r.need(tokens);
          bytes[recompute] = need.bytes;
          EXPECT_LT(need.saved, need.bytes);
          EXPECT_GE(need.bytes, arena_need_forward(r.shape, tokens, 1));
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
  ModelSpec spec = smollm2_135m();
  const int64_t plain = Rehearsed{.spec = spec}.need(1024).saved;
  const AdapterSpec lora = adapter_r16();
  // Seven adapters of rank 16 per layer, bf16.
  EXPECT_EQ((Rehearsed{.spec = spec, .adapter = &lora}.need(1024).saved), plain + 1024 * 30 * 7 * 16 * 2);
  for (LayerSpec& layer : spec.layers) layer.attention = AttentionKind::kGroupedNormed;
  // q and k before their norm, and an rstd per head.
  EXPECT_EQ(Rehearsed{.spec = spec}.need(1024).saved, plain + 1024 * 30 * ((576 + 192) * 2 + (9 + 3) * 4));
}

TEST(ArenaNeed, OfALargeGroupIsThatOfAllItsMicroBatches) {
  const AdapterSpec lora = adapter_r16();
  // The head is the peak, or a block's backward pass.
  for (const int64_t vocab : {300, 40000}) {
    for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
      for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
        for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
          Rehearsed r{.spec = make_spec({64, 640, 3, 4, 2, 16, vocab, false}), .adapter = adapter};
          r.shape.device = device;
          r.shape.recompute = (bits & 1) != 0;
          r.shape.inputs_off_device = r.shape.recompute && (bits & 2) != 0;
          r.shape.cut_head = (bits & 4) != 0;
          for (const int64_t group : {1, 2, 3, 4, 7, 20}) {
            r.shape.group = group;
            const ArenaNeed need = r.need(100), whole = arena_need_whole(r.shape, 100, 1);
            EXPECT_EQ(need.bytes, whole.bytes) << "group " << group << ", bits " << bits;
            EXPECT_EQ(need.saved, whole.saved) << "group " << group << ", bits " << bits;
          }
        }
      }
    }
  }
}

TEST(ArenaNeed, OfAGroupIsThatOfItsMicroBatches) {
  Rehearsed r{.spec = smollm2_135m()};
  r.shape.recompute = true;
  const int64_t one = r.need(512).saved;
  r.shape.group = 5;
  EXPECT_EQ(r.need(512).saved, 5 * one);
  r.shape.inputs_off_device = true;
  EXPECT_EQ(r.need(512).saved, 0);
}

}  // namespace
}  // namespace lm
