#include "plan/gpu.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "kernels/attention_chunks.h"
#include "plan/device_reserve.h"
#include "shapes.h"

namespace lm {
namespace {

constexpr const char* kRelease = "75-real,80-real,86-real,89-real,90-real,100-real,120";

TEST(Gpu, OfAnUnknownNameHasThePeaksOfItsArchitecture) {
  struct Card {
    const char* name;
    GpuFigures figures;
    double bf16_tflops, gb_per_second;  // as published
  };
  // What NVML says of cards whose peaks are published, under names that the table does not have.
  const Card cards[] = {{"a card of 8.0", {{8, 0}, 6912, 1410, 1593, 5120}, 312, 2039},
                        {"GeForce of 8.6", {{8, 6}, 10496, 2100, 9751, 384}, 71, 936},
                        {"workstation of 8.6", {{8, 6}, 10752, 2100, 8001, 384}, 155, 768},
                        {"GeForce of 8.9", {{8, 9}, 16384, 3105, 10501, 384}, 165.2, 1008},
                        {"workstation of 8.9", {{8, 9}, 18176, 2520, 9001, 384}, 362, 864},
                        {"a card of 9.0", {{9, 0}, 16896, 1980, 2619, 5120}, 989.4, 3350},
                        {"GeForce of 12.0", {{12, 0}, 21760, 3090, 14001, 512}, 209.5, 1792}};
  for (const Card& card : cards) {
    const Gpu gpu = gpu_of(card.name, card.figures);
    EXPECT_EQ(built_in_gpu(card.name).bf16_flops, 0) << card.name;
    EXPECT_NEAR(gpu.bf16_flops / (card.bf16_tflops * 1e12), 1, 0.2) << card.name;
    EXPECT_NEAR(gpu.bandwidth / (card.gb_per_second * 1e9), 1, 0.01) << card.name;
    EXPECT_EQ(gpu.capability, card.figures.capability);
  }
  EXPECT_EQ(gpu_of("something", {}).bf16_flops, 0);
}

TEST(Gpu, KnowsTheCardsThatPeopleHave) {
  for (const char* name : {"NVIDIA GeForce RTX 5080", "NVIDIA GeForce RTX 5070", "NVIDIA GeForce RTX 5070 Ti",
                           "NVIDIA GeForce RTX 4080", "NVIDIA A40", "NVIDIA A30",
                           "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA B300 SXM6 AC",
                           "NVIDIA H20", "NVIDIA L20", "NVIDIA GH200 480GB"}) {
    const Gpu gpu = built_in_gpu(name);
    EXPECT_GT(gpu.bf16_flops, 50e12) << name;
    EXPECT_GT(gpu.bandwidth, 600e9) << name;
    EXPECT_GT(gpu.memory_bytes, 11'000'000'000) << name;
    EXPECT_TRUE(gpu.capability.known()) << name;
  }
  EXPECT_EQ(built_in_gpu("NVIDIA RTX A4000").bf16_flops, 0) << "no A40";
  for (const char* name : {"Tesla T4", "T4"}) {
    EXPECT_EQ(built_in_gpu(name).capability, (ComputeCapability{7, 5}));
    EXPECT_EQ(built_in_gpu(name).memory_bytes, 16'000'000'000);
  }
  EXPECT_EQ(built_in_gpu("NVIDIA T400 4GB").bf16_flops, 0) << "no T4";
  EXPECT_GT(built_in_gpu("NVIDIA H200").memory_bytes, built_in_gpu("NVIDIA H20").memory_bytes);
  EXPECT_GT(built_in_gpu("NVIDIA GeForce RTX 5070 Ti").bf16_flops,
            built_in_gpu("NVIDIA GeForce RTX 5070").bf16_flops);
}

TEST(Gpu, ComputesWhereTheProgramHasItsCode) {
  const auto obstacle = [](ComputeCapability c, const char* code) { return gpu_obstacle(c, code).what; };
  for (const ComputeCapability& c :
       {ComputeCapability{8, 0}, {8, 6}, {8, 7}, {8, 9}, {9, 0}, {10, 0}, {10, 3}, {12, 0}, {12, 1}, {13, 0}})
    EXPECT_EQ(obstacle(c, kRelease), "") << c.text();
  EXPECT_EQ(obstacle({0, 0}, kRelease), "") << "nobody knows";
  // Machine code of one generation alone, and PTX for what comes later.
  EXPECT_EQ(obstacle({9, 0}, "90"), "");
  EXPECT_EQ(obstacle({12, 0}, "90"), "");
  EXPECT_NE(obstacle({12, 0}, "90-real"), "");
  EXPECT_EQ(obstacle({8, 6}, "90"), "compute capability 8.6, and lmlaunch-cuda holds code for 9.0");
  EXPECT_EQ(obstacle({8, 0}, "86"), "compute capability 8.0, and lmlaunch-cuda holds code for 8.6");
}

TEST(Gpu, BeforeTuringIsNoCardToTrainOn) {
  for (const char* code : {kRelease, "90", ""}) {
    const GpuObstacle obstacle = gpu_obstacle({7, 0}, code);
    EXPECT_NE(obstacle.what.find("compute capability 7.0: GPUs can train from 7.5 on"), std::string::npos)
        << obstacle.what;
    EXPECT_NE(obstacle.next.find("--gpus 0"), std::string::npos);
  }
  EXPECT_EQ(gpu_obstacle({7, 5}, kRelease).what, "");
}

// Without flash attention, whose workspace is another one.
TEST(Gpu, WithoutBf16TrainsInFp16AndFp32) {
  Case c{.device = DeviceType::kCuda};
  c.machine = gpu_machine("NVIDIA H100 80GB HBM3");
  c.machine.gpus.front().capability = {7, 5};
  try {
    c.draft();
    ADD_FAILURE() << "bf16 on a card without";
  } catch (const Error& error) {
    EXPECT_EQ(error.text().area, "GPU-34");
    EXPECT_NE(error.text().what.find("a card without bf16, which model.dtype = \"bf16\" needs"),
              std::string::npos);
    EXPECT_NE(error.text().next.find("model.dtype = \"fp16\""), std::string::npos);
  }
  for (const ModelDType dtype : {ModelDType::kF16, ModelDType::kF32}) {
    c.config.model.dtype = dtype;
    c.config.optimizer.master = Master::kF32;
    EXPECT_NO_THROW(c.draft());
  }
}

// From 193 to 224 some cards have no backward pass of LibTorch's attention, and beyond 256 none has: there is
// another (kernels/attention_chunks.h).
TEST(Gpu, OfAnyKindTrainsHeadsOfAnySize) {
  for (const int64_t size : {192, 194, 224, 226, 512}) {
    Case c{.device = DeviceType::kCuda};
    for (LayerSpec& layer : c.spec.layers) layer.attention().head_dim = size;
    for (const char* card : {"NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"}) {
      SCOPED_TRACE(std::string(card) + ", " + std::to_string(size));
      c.machine = gpu_machine(card);
      EXPECT_NO_THROW(c.draft());
    }
  }
}

// What attention in chunks takes (attention_chunks.h) is left to LibTorch; which card does so from 193 to 224
// the plan does not ask.
TEST(Gpu, KeepsMemoryForAttentionInChunks) {
  const auto reserved = [](int64_t head_dim, double softcap, DType dtype) {
    const ModelSpec spec = llama_spec({.heads = 8, .kv_heads = 8, .head_dim = head_dim});
    ModelSpec capped = spec;
    for (LayerSpec& layer : capped.layers) layer.attention().softcap = softcap;
    return attention_workspace(capped, {.tokens = 2048, .processors = 1, .dtype = dtype});
  };
  const auto chunks = [](int64_t head_dim, bool capped, DType dtype) {
    return chunk_memory({.tokens = 2048,
                         .keys = 2048,
                         .heads = 8,
                         .kv_heads = 8,
                         .head_dim = head_dim,
                         .capped = capped,
                         .backward = true,
                         .dtype = dtype})
        .bytes;
  };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    EXPECT_EQ(reserved(64, 50, dtype), chunks(64, true, dtype));
    EXPECT_EQ(reserved(512, 0, dtype), chunks(512, false, dtype));
    EXPECT_NE(reserved(64, 0, dtype), chunks(64, false, dtype));
  }
  EXPECT_GE(reserved(208, 0, DType::kBF16), chunks(208, false, DType::kBF16));
}

// Our products have a workspace, and those of attention in chunks, which LibTorch makes, another one.
TEST(Gpu, KeepsMemoryForEachWorkspaceOfProducts) {
  const auto beside_attention = [](int64_t head_dim, double softcap) {
    ModelSpec spec = llama_spec({.heads = 8, .kv_heads = 8, .head_dim = head_dim});
    for (LayerSpec& layer : spec.layers) layer.attention().softcap = softcap;
    const AttentionShape shape{.tokens = 2048, .processors = 1};
    return library_device_bytes(spec, shape) - attention_workspace(spec, shape);
  };
  const int64_t plain = beside_attention(64, 0);
  const std::pair<int64_t, double> in_chunks[] = {{64, 50}, {512, 0}, {208, 0}};
  for (const auto& [head_dim, softcap] : in_chunks)
    EXPECT_EQ(beside_attention(head_dim, softcap) - plain, 32 * kMiB) << head_dim << ", " << softcap;
  EXPECT_EQ(beside_attention(128, 0), plain);
}

}  // namespace
}  // namespace lm
