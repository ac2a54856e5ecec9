#include "plan/machine.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(KnownGpu, GivesDensePeaksByTheDriversName) {
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA H200").bf16_flops, 989.4e12);
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA H100 80GB HBM3").bf16_flops, 989.4e12);
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA A100-SXM4-80GB").bf16_flops, 312e12);
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA GeForce RTX 4090").bf16_flops, 165.2e12);
  EXPECT_DOUBLE_EQ(known_gpu("nvidia l40s").bf16_flops, 362e12);
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA GeForce RTX 3090").bf16_flops, 71e12);
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA RTX 6000 Ada Generation").bf16_flops, 364e12);
  EXPECT_DOUBLE_EQ(known_gpu("NVIDIA B200").bf16_flops, 2250e12);
}

TEST(KnownGpu, TellsVariantsApart) {
  EXPECT_LT(known_gpu("NVIDIA H100 PCIe").bf16_flops, known_gpu("NVIDIA H100 80GB HBM3").bf16_flops);
  EXPECT_EQ(known_gpu("NVIDIA A100-SXM4-40GB").memory_bytes, 40'000'000'000);
  EXPECT_EQ(known_gpu("NVIDIA A100-SXM4-80GB").memory_bytes, 80'000'000'000);
  EXPECT_NE(known_gpu("NVIDIA L4").bf16_flops, known_gpu("NVIDIA L40").bf16_flops);
  EXPECT_NE(known_gpu("NVIDIA L40").bf16_flops, known_gpu("NVIDIA L40S").bf16_flops);
  EXPECT_NE(known_gpu("NVIDIA A10").bf16_flops, known_gpu("NVIDIA A100-SXM4-80GB").bf16_flops);
}

TEST(KnownGpu, SaysNothingOfWhatItDoesNotKnow) {
  for (const char* name : {"", "NVIDIA GeForce GTX 1650", "NVIDIA GeForce RTX 4090 Laptop GPU"}) {
    const Gpu gpu = known_gpu(name);
    EXPECT_EQ(gpu.name, name);
    EXPECT_EQ(gpu.bf16_flops, 0) << name;
    EXPECT_EQ(gpu.memory_bytes, 0) << name;
  }
}

TEST(Machine, HasNoMoreMemoryThanItsLimit) {
  Machine machine;
  EXPECT_EQ(machine.host_capacity(), 0);
  machine.host_memory = 100;
  EXPECT_EQ(machine.host_capacity(), 100);
  machine.host_limit = 60;
  EXPECT_EQ(machine.host_capacity(), 60);
  machine.host_limit = 200;
  EXPECT_EQ(machine.host_capacity(), 100);
  machine.host_memory = 0;
  EXPECT_EQ(machine.host_capacity(), 200);
}

}  // namespace
}  // namespace lm
