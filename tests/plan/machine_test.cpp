#include "plan/machine.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(BuiltInGpu, GivesDensePeaksByTheDriversName) {
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA H200").bf16_flops, 989.4e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA H100 80GB HBM3").bf16_flops, 989.4e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA A100-SXM4-80GB").bf16_flops, 312e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA GeForce RTX 4090").bf16_flops, 165.2e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("nvidia l40s").bf16_flops, 362e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA GeForce RTX 3090").bf16_flops, 71e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA RTX 6000 Ada Generation").bf16_flops, 364e12);
  EXPECT_DOUBLE_EQ(built_in_gpu("NVIDIA B200").bf16_flops, 2250e12);
}

TEST(BuiltInGpu, TellsVariantsApart) {
  EXPECT_LT(built_in_gpu("NVIDIA H100 PCIe").bf16_flops, built_in_gpu("NVIDIA H100 80GB HBM3").bf16_flops);
  EXPECT_EQ(built_in_gpu("NVIDIA A100-SXM4-40GB").memory_bytes, 40'000'000'000);
  EXPECT_EQ(built_in_gpu("NVIDIA A100-SXM4-80GB").memory_bytes, 80'000'000'000);
  EXPECT_NE(built_in_gpu("NVIDIA L4").bf16_flops, built_in_gpu("NVIDIA L40").bf16_flops);
  EXPECT_NE(built_in_gpu("NVIDIA L40").bf16_flops, built_in_gpu("NVIDIA L40S").bf16_flops);
  EXPECT_NE(built_in_gpu("NVIDIA A10").bf16_flops, built_in_gpu("NVIDIA A100-SXM4-80GB").bf16_flops);
}

TEST(BuiltInGpu, SaysNothingOfWhatItDoesNotKnow) {
  for (const char* name : {"", "NVIDIA GeForce GTX 1650", "NVIDIA GeForce RTX 4090 Laptop GPU"}) {
    const Gpu gpu = built_in_gpu(name);
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

TEST(Machine, SurvivesAsText) {
  Machine machine;
  machine.library_bytes = 123456789;
  machine.gemm_sustained = 0.9;
  machine.attention_flops = 95e9;
  machine.gemm_call_seconds = 9e-6;
  machine.decode_bandwidth = 5e9;
  machine.instructions = Instructions::kAvx2;
  machine.gpus.push_back(built_in_gpu("NVIDIA L40"));
  machine.disks.push_back({"/disk", 1, 3e9, 2e9, 2.5e9});
  const Machine read = parse_machine(machine_json(machine));
  EXPECT_EQ(read.library_bytes, 123456789);
  EXPECT_EQ(read.attention_flops, 95e9);
  EXPECT_EQ(read.gemm_call_seconds, 9e-6);
  EXPECT_EQ(read.decode_bandwidth, 5e9);
  EXPECT_EQ(read.instructions, Instructions::kAvx2);
  ASSERT_EQ(read.gpus.size(), 1U);
  EXPECT_EQ(read.gpus[0].bf16_flops, 181e12);
  EXPECT_EQ(read.gpus[0].capability.text(), "8.9");
  ASSERT_EQ(read.disks.size(), 1U);
  EXPECT_EQ(read.disks[0].both_bandwidth, 2.5e9);
  EXPECT_EQ(machine_json(read), machine_json(machine));
}

// What was measured counts, less or more than the default.
TEST(Machine, TakesWhatItsLibrariesWereSeenToTake) {
  Machine machine;
  const int64_t assumed = host_library_bytes(machine, DeviceType::kCpu);
  machine.library_bytes = assumed / 2;
  const int64_t little = host_library_bytes(machine, DeviceType::kCpu);
  EXPECT_LT(little, assumed);
  machine.library_bytes = 2 * assumed;
  EXPECT_EQ(host_library_bytes(machine, DeviceType::kCpu) - little, 2 * assumed - assumed / 2);
  EXPECT_GT(host_library_bytes(machine, DeviceType::kCuda), 2 * assumed);  // CUDA's are not in it
}

// Both ways at once: a disk that takes turns has half of each rate, one that does not has all of it.
TEST(Machine, SharesItsDisksBetweenBothWays) {
  Machine machine;
  const auto share = [&](double read, double write, double both) {
    machine.disks = {{"/disk", 1, read, write, both}};
    return link_rates(machine, DeviceType::kCpu).disk_share;
  };
  EXPECT_DOUBLE_EQ(share(2e9, 2e9, 2e9), 0.5);
  EXPECT_DOUBLE_EQ(share(3e9, 1e9, 1.5e9), 0.5);
  EXPECT_DOUBLE_EQ(share(2e9, 2e9, 4e9), 1);
  EXPECT_DOUBLE_EQ(share(2e9, 2e9, 5e9), 1);
  EXPECT_DOUBLE_EQ(share(2e9, 2e9, 0), 1);  // not measured
  EXPECT_DOUBLE_EQ(share(0, 0, 2e9), 1);
  machine.disks = {{"/one", 1, 1e9, 1e9, 1e9}, {"/two", 1, 1e9, 1e9, 2e9}};
  EXPECT_DOUBLE_EQ(link_rates(machine, DeviceType::kCpu).disk_share, 0.75);
}

}  // namespace
}  // namespace lm
