// What a dry run says of the arena, against pencil and paper and published figures; against the arena that
// a real step fills: arena_test.
#include "plan/dry_run.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/arena.h"
#include "base/bytes.h"
#include "plan/cost_model.h"
#include "shapes.h"

namespace lm {
namespace {

struct Counting {
  ModelSpec spec;
  const AdapterSpec* adapter = nullptr;
  DType dtype = DType::kBF16;
  ModelLayout layout = make_layout(spec, adapter, dtype);
  StepConfig step{.units = {}, .arithmetic = {.dtype = dtype}};
  ModelParts model() const { return {spec, layout, adapter}; }
  void chunked_head() {
    step.units = schedule_units(spec.layer_count(), ceil_div(spec.vocab, kVocabularySegment));
  }
  ArenaNeed need(int64_t tokens, int64_t documents = 1) const {
    return arena_need(model(), step, tokens, documents);
  }
};

// Small enough for pencil and paper: fp32, T = 64 tokens, H = 64, F = 128, q 64, k and v 32 each, V = 1000.
ArenaNeed small_need(int64_t layers, RecomputeChoice recompute) {
  Counting r{.spec = make_spec({64, 128, layers, 2, 1, 32, 1000}), .dtype = DType::kF32};
  r.step.arithmetic.row_chunk = 32;
  r.step.recompute = recompute;
  r.step.device = DeviceType::kCuda;
  return r.need(64);
}

// Token, position, sample, rows with targets and these (the last token has none), two starts of documents:
// 320 numbers in one block.
constexpr int64_t kBatch = 5 * 256, kHidden = 64 * 64 * 4, kPicked = 63 * 64 * 4;
// rstd1, qkv, attention, lse, x_mid, rstd2, gate_up.
constexpr int64_t kSaved = 256 + 64 * 128 * 4 + kHidden + 2 * 64 * 4 + kHidden + 256 + 64 * 256 * 4;
// dX in fp32, where the gathered rows lie first, and to which a GPU's products add; rstd, four statistics and
// the nll; of a chunk: logits. The normed rows lie in dx.
constexpr int64_t kHead = kPicked + 6 * 256 + 32 * 1000 * 4;
// MLP: dh, normed, dnormed, a norm's column sums (as much as attention's dqkv, normed, dnormed).
constexpr int64_t kBackward = 64 * 128 * 4 + 2 * kHidden + 512;

TEST(ArenaNeed, EqualsAHandComputedStep) {
  const ArenaNeed need = small_need(1, Recompute::kNone);
  EXPECT_EQ(need.saved, kHidden + kSaved + kHidden);
  EXPECT_EQ(need.logits, 32 * 1000 * 4);
  EXPECT_EQ(need.bytes, kBatch + kHidden + need.saved + kHead);
  EXPECT_EQ(need.bytes, 328'192);
}

TEST(ArenaNeed, EqualsAHandComputedStepWithRecomputation) {
  const ArenaNeed need = small_need(2, Recompute::kBlock);
  EXPECT_EQ(need.saved, 3 * kHidden);
  EXPECT_EQ(need.bytes, kBatch + kHidden + need.saved + kSaved + kBackward);
  EXPECT_EQ(need.bytes, 264'960);
}

TEST(ArenaNeed, SavesThePublishedBytesPerToken) {
  // Per token and layer in bf16: x_in, q, k, v, attention's output, x_mid, gate and up; in fp32 two rstd and
  // an lse per head. Recomputation keeps 2 H bytes, 65,536 for all layers of Llama-3.2-1B.
  Counting r{.spec = llama_1b()};
  const int64_t layer = 2 * (2048 + 3072 + 2048 + 2048 + 16384) + 4 * (2 + 32);
  EXPECT_EQ(r.need(4096, 2).saved, 4096 * (16 * layer + 2 * 2048));
  r.step.recompute = Recompute::kBlock;
  EXPECT_EQ(r.need(4096, 2).saved, 4096 * (65'536 + 2 * 2048));
}

TEST(ArenaNeed, GrowsWithTokensAndShrinksWithRecomputation) {
  const AdapterSpec lora = adapter_r16();
  for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
      Counting r{.spec = smollm2_135m(), .adapter = adapter};
      r.step.device = device;
      r.step.arithmetic.threads = 2;
      int64_t last[2] = {0, 0};
      for (const int64_t tokens : {64, 100, 512, 2048, 8192}) {
        int64_t bytes[2];
        for (const bool recompute : {false, true}) {
          r.step.recompute = recompute ? Recompute::kBlock : Recompute::kNone;
          const ArenaNeed need = r.need(tokens);
          bytes[recompute] = need.bytes;
          EXPECT_LT(need.saved, need.bytes);
          EXPECT_GE(need.bytes, arena_need_forward(r.model(), r.step, tokens, 1));
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
  const int64_t plain = Counting{.spec = spec}.need(1024).saved;
  const AdapterSpec lora = adapter_r16();
  // Seven adapters of rank 16 per layer, bf16.
  EXPECT_EQ((Counting{.spec = spec, .adapter = &lora}.need(1024).saved), plain + 1024 * 30 * 7 * 16 * 2);
  norm_heads(spec);
  // q and k before their norm, and an rstd per head.
  EXPECT_EQ(Counting{.spec = spec}.need(1024).saved, plain + 1024 * 30 * ((576 + 192) * 2 + (9 + 3) * 4));
}

TEST(ArenaNeed, OfALargeGroupIsThatOfAllItsMicroBatches) {
  const AdapterSpec lora = adapter_r16();
  // The head is the peak, or a block's backward pass.
  for (const int64_t vocab : {300, 40000}) {
    for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
      for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const RecomputeChoice levels[] = {Recompute::kNone, Recompute::kBlock, Recompute::kAttention,
                                          Recompute::kBlock};
        for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
          Counting r{.spec = make_spec({64, 640, 3, 4, 2, 16, vocab}, false), .adapter = adapter};
          r.step.device = device;
          r.step.recompute = levels[bits & 3];
          if ((bits & 3) == 3) r.step.pool(Pool::kActivations).slots = 1;
          if ((bits & 4) != 0) r.chunked_head();
          for (const int64_t group : {1, 2, 3, 4, 7, 20}) {
            r.step.group = group;
            const ArenaNeed need = r.need(100), whole = arena_need_whole(r.model(), r.step, 100, 1);
            EXPECT_EQ(need.bytes, whole.bytes) << "group " << group << ", bits " << bits;
            EXPECT_EQ(need.saved, whole.saved) << "group " << group << ", bits " << bits;
          }
        }
      }
    }
  }
}

TEST(ArenaNeed, OfAGroupIsThatOfItsMicroBatches) {
  Counting r{.spec = smollm2_135m()};
  r.step.recompute = Recompute::kBlock;
  const int64_t one = r.need(512).saved;
  r.step.group = 5;
  EXPECT_EQ(r.need(512).saved, 5 * one);
  r.step.pool(Pool::kActivations).slots = 1;
  EXPECT_EQ(r.need(512).saved, 0);
}

// Windows that no document reaches make layers different, and change nothing else.
void make_all_different(ModelSpec& spec) {
  int64_t window = 1 << 20;
  for (LayerSpec& layer : spec.layers) layer.attention().window = ++window;
}

const Cost& cost_of(const PassCosts& costs, OperationKind kind, int64_t unit, int64_t micro) {
  return costs[static_cast<size_t>(unit)][static_cast<size_t>(kind)][static_cast<size_t>(micro)];
}

// Of every operation that two steps have, all that it costs.
void expect_same_costs(const Counting& a, const Counting& b, const StepWork& micro) {
  const PassCosts one = pass_costs(a.model(), a.step, micro), other = pass_costs(b.model(), b.step, micro);
  const int64_t layers = a.spec.layer_count(), segments = a.step.segments();
  for (int64_t unit = 0; unit < layers + 2 + segments; ++unit) {
    for (int kind = 0; kind < kOperationKinds; ++kind) {
      for (const int64_t micro_batch : {0, 1}) {
        const Operation op{static_cast<OperationKind>(kind), unit, micro_batch};
        const Cost x = cost_of(one, op.kind, unit, micro_batch),
                   y = cost_of(other, op.kind, unit, micro_batch);
        EXPECT_EQ(x.calls, y.calls) << operation_name(op.kind) << " of unit " << unit;
        EXPECT_EQ(x.gemm_flops, y.gemm_flops) << operation_name(op.kind) << " of unit " << unit;
        EXPECT_EQ(x.attention_flops, y.attention_flops) << operation_name(op.kind) << " of unit " << unit;
        EXPECT_EQ(x.bytes + x.pass_bytes, y.bytes + y.pass_bytes)
            << operation_name(op.kind) << " of unit " << unit;
      }
    }
  }
}

TEST(DryRun, LayersThatAreAlikeAreCarriedOutOnce) {
  const AdapterSpec lora = adapter_r16();
  for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
      ModelSpec spec = make_spec({64, 640, 7, 4, 2, 16, 20000}, false);
      // Two kinds, the second of which is met late.
      for (const size_t i : {2, 5, 6}) spec.layers[i].attention().head_norm = NormSpec();
      ModelSpec different = spec;
      make_all_different(different);
      Counting alike{.spec = spec, .adapter = adapter}, whole{.spec = different, .adapter = adapter};
      const RecomputeChoice levels[] = {
          Recompute::kNone, Recompute::kAttention, Recompute::kBlock, {Recompute::kBlock, 2}};
      for (Counting* r : {&alike, &whole}) {
        r->step.recompute = levels[bits & 3];
        if ((bits & 3) == 2) r->chunked_head();
        r->step.group = (bits & 4) != 0 ? 3 : 1;
      }
      const ArenaNeed a = alike.need(100), w = whole.need(100);
      EXPECT_EQ(a.bytes, w.bytes) << "bits " << bits;
      EXPECT_EQ(a.saved, w.saved) << "bits " << bits;
      EXPECT_EQ(gemm_shapes(alike.model(), alike.step, 100, 2),
                gemm_shapes(whole.model(), whole.step, 100, 2));
      expect_same_costs(alike, whole, uniform_work(100, 50));
    }
  }
}

// The second micro-batch's chunks all add to gradients: of two nothing is repeated, and the others cost as
// much as the second.
TEST(DryRun, ChunksOfRowsThatAreAlikeAreCarriedOutOnce) {
  for (const bool cut : {false, true}) {
    Counting r{.spec = make_spec({64, 128, 2, 2, 1, 32, 9000}, false), .dtype = DType::kF32};
    r.step.arithmetic.row_chunk = 32;
    if (cut) r.chunked_head();
    const auto head = [&](int64_t chunks) {
      const PassCosts costs =
          pass_costs(r.model(), r.step,
                     {.tokens = 4096, .target_rows = 32.0 * static_cast<double>(chunks), .squares = 4096});
      return cost_of(costs, cut ? OperationKind::kBackward : OperationKind::kHead, cut ? 4 : 3, 1);
    };
    const Cost one = head(1), two = head(2), many = head(100);
    ASSERT_GT(two.gemm_flops, one.gemm_flops);
    EXPECT_EQ(many.gemm_flops, one.gemm_flops + 99 * (two.gemm_flops - one.gemm_flops));
    EXPECT_EQ(many.calls, one.calls + 99 * (two.calls - one.calls));
    EXPECT_EQ(many.pass_bytes, one.pass_bytes + 99 * (two.pass_bytes - one.pass_bytes));
  }
}

// Each is one more pass, where it belongs.
TEST(DryRun, CountsPositionsFactorsAndScalars) {
  const ModelSpec plain = make_spec({64, 128, 2, 2, 1, 32, 9000});  // two segments of the vocabulary
  const auto costs = [](const ModelSpec& spec) {
    const Counting r{.spec = spec};
    return pass_costs(r.model(), r.step, uniform_work(100, 50));
  };
  const PassCosts base = costs(plain);
  const auto more = [&](const PassCosts& with, OperationKind kind, int64_t unit) {
    return cost_of(with, kind, unit, 0).calls - cost_of(base, kind, unit, 0).calls;
  };
  ModelSpec positions = plain, capped = plain, scalar = plain;
  positions.embedding.positions = 128;
  capped.head.logit_cap = 30;
  for (LayerSpec& layer : scalar.layers) layer.scalar = true;
  scalar.names.vectors.push_back({"scalar", "scalar"});
  const PassCosts p = costs(positions), c = costs(capped), s = costs(scalar);
  EXPECT_EQ(more(p, OperationKind::kForward, 0), 1);
  EXPECT_EQ(more(p, OperationKind::kBackward, 0), 1);
  EXPECT_EQ(cost_of(p, OperationKind::kBackward, 0, 0).bytes,
            2 * cost_of(base, OperationKind::kBackward, 0, 0).bytes);
  EXPECT_EQ(more(c, OperationKind::kHead, 3), 2);
  for (const OperationKind kind : {OperationKind::kForward, OperationKind::kBackward}) {
    EXPECT_EQ(more(s, kind, 1), 1);
    EXPECT_EQ(more(c, kind, 1), 0);
  }
}

TEST(Plan, CountsTheRowsOfLearnedPositions) {
  Case c;
  stay_near(c.config);
  c.config.data.max_length = 512;
  c.config.train.micro_batch = 1;
  const Plan without = c.plan();
  c.spec.embedding.positions = 1024;
  const Plan with = c.plan();
  const auto more = [&](const char* name) { return class_bytes(with, name) - class_bytes(without, name); };
  EXPECT_EQ(more("weights"), 1024 * 576 * 2);
  EXPECT_EQ(more("embedding rows"), 512 * 576 * 4);
  const int64_t order = 1024 + c.config.train.global_batch * 512 + with.numerics.micro_batches * 512;
  EXPECT_EQ(more("tables"), 4 * order + 1024 * 576 / kGranule * 8);
}

TEST(DryRun, ManyDocumentsAreANumber) {
  Counts listed, counted;
  const int32_t start[] = {0, 33, 66, 100};
  AttentionForward args{
      .documents = {start, 3}, .tokens = 100, .heads = 4, .kv_heads = 2, .head_dim = 16, .window = 20};
  const Kernels& kernels = counting_kernels(DeviceType::kCpu);
  kernels.attention_forward(args, counting_stream(listed, DeviceType::kCpu, 1));
  args.documents.start = nullptr;
  kernels.attention_forward(args, counting_stream(counted, DeviceType::kCpu, 1));
  EXPECT_GT(listed.cost.attention_flops, 0);
  EXPECT_EQ(listed.cost.attention_flops, counted.cost.attention_flops);
}

TEST(DryRun, WhatIsBeyondAllMemoryIsANumberToo) {
  Counting r{.spec = make_spec({1 << 16, 1 << 18, 500, 64, 64, 1024, 300'000}, false)};
  r.step.group = 1 << 20;
  const ArenaNeed need = r.need(std::numeric_limits<int32_t>::max());
  EXPECT_EQ(need.bytes, Arena::kEndless);
  EXPECT_GT(need.saved, int64_t{1} << 50);
}

}  // namespace
}  // namespace lm
