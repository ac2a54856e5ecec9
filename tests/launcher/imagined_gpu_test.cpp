#include "launcher/cli/imagined_gpu.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "plan/cost_model.h"

namespace lm {
namespace {

CommandLine line(std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"plan", "c.toml"});
  return parse_command_line(flags, Reader::kCli);
}

TEST(ImaginedGpu, OfANameIsThatCard) {
  EXPECT_FALSE(imagined_gpu(line({})));
  for (const char* name : {"RTX-4090", "rtx 4090", "NVIDIA GeForce RTX 4090", "4090"}) {
    const auto gpu = imagined_gpu(line({"--gpu", name}));
    ASSERT_TRUE(gpu);
    EXPECT_EQ(gpu->memory_bytes, int64_t{24} * 1'000'000'000) << name;
    EXPECT_DOUBLE_EQ(gpu->bf16_flops, 165.2e12) << name;
    EXPECT_EQ(gpu->capability.text(), "8.9");
  }
  EXPECT_DOUBLE_EQ(imagined_gpu(line({"--gpu", "RTX-5070-Ti"}))->bandwidth, 896e9);
  EXPECT_EQ(imagined_gpu(line({"--gpu", "H100", "--gpu-memory", "94GB"}))->memory_bytes,
            int64_t{94'000'000'000});
}

TEST(ImaginedGpu, OfNoKnownNameIsRefusedWithTheNearest) {
  try {
    imagined_gpu(line({"--gpu", "RTX-4099"}));
    ADD_FAILURE() << "known";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kUsage);
    EXPECT_NE(std::string(error.what()).find("did you mean RTX 5090?"), std::string::npos) << error.what();
  }
  EXPECT_THROW(imagined_gpu(line({"--gpu-flops", "100"})), Error) << "of which memory?";
  EXPECT_THROW(imagined_gpu(line({"--gpu-memory", "8GB", "--gpu-flops", "0"})), Error);
}

TEST(ImaginedGpu, SaysWhatIsAssumed) {
  const auto said = [](std::vector<std::string> flags) {
    return assumptions(*imagined_gpu(line(std::move(flags))));
  };
  EXPECT_EQ(said({"--gpu", "RTX-4090"}), "RTX-4090: 22.35 GiB, 165.2 TFLOP/s of bf16, 1008 GB/s");
  EXPECT_EQ(said({"--gpu", "T4"}), "T4: 14.90 GiB, 65 TFLOP/s of fp16, 320 GB/s");
  EXPECT_EQ(said({"--gpu-memory", "24GiB"}),
            "a GPU: 24.00 GiB, 100 TFLOP/s of bf16 (assumed), 500 GB/s (assumed)");
  EXPECT_EQ(said({"--gpu-memory", "24GiB", "--gpu-flops", "71.5", "--gpu-bandwidth", "936GB"}),
            "a GPU that is described: 24.00 GiB, 71.5 TFLOP/s of bf16, 936 GB/s");
}

}  // namespace
}  // namespace lm
