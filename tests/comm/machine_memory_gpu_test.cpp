// Memory that ranks with a GPU each have in common: the first one's GPU fills it, all of them read it, and
// each rank has it registered as long as it is mapped.
#include "comm/machine_memory.h"

#include <gtest/gtest.h>

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/arena.h"
#include "base/host_address.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/machine_mapping.h"
#include "tests/support/on_emulator.h"

namespace lm {
namespace {

constexpr int64_t kBytes = (int64_t{9} << 20) + 4096;

std::vector<std::byte> pattern() {
  std::vector<std::byte> out(kBytes);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>((i * 7 + i / 4096) & 0xff);
  return out;
}

// Through the GPU, as weights are loaded.
void fill(GpuRank& rank, std::span<std::byte> bytes) {
  const std::vector<std::byte> made = pattern();
  const Memory device(DeviceType::kCuda, kBytes);
  copy_bytes(device.data(), made.data(), kBytes, rank.compute);
  copy_bytes(bytes.data(), device.data(), kBytes, rank.compute);
  synchronize(rank.compute);
}

std::vector<std::byte> read(GpuRank& rank, std::span<const std::byte> bytes) {
  std::vector<std::byte> out(kBytes);
  const Memory device(DeviceType::kCuda, kBytes);
  copy_bytes(device.data(), bytes.data(), kBytes, rank.compute);
  copy_bytes(out.data(), device.data(), kBytes, rank.compute);
  synchronize(rank.compute);
  return out;
}

void share(GpuRank& rank) {
  void* was = nullptr;
  {
    MachineMemory memory(rank.peers, 3);
    ASSERT_TRUE(memory.works());
    const std::span<std::byte> bytes = memory.map(kBytes, DeviceType::kCuda);
    was = bytes.data();
    EXPECT_EQ(memory.refusal(), "");
    EXPECT_FALSE(cuda_register_host(bytes.data(), 4096));  // it already is
    EXPECT_FALSE(cuda_register_host(bytes.data() + kBytes - 4096, 4096));
    EXPECT_EQ(own_mapping().resident, kBytes / 1024);
    EXPECT_EQ(own_mapping().permissions, memory.first() ? "rw-s" : "r--s");
    if (memory.first()) fill(rank, bytes);
    memory.filled();
    EXPECT_EQ(own_mapping().permissions, "r--s");
    EXPECT_TRUE(read(rank, bytes) == pattern());
    EXPECT_EQ(memory.of_others(), kBytes - kBytes / 3);
    rank.peers.barrier("all have it");
    EXPECT_LE(std::abs(own_mapping().share - kBytes / 1024 / 3), kBytes / 1024 * 3 / 100);
    rank.peers.barrier("all have looked");
  }
  // Neither mapped nor registered: an address that the driver still has refuses what comes there next.
  ASSERT_EQ(own_mapping().resident, -1);
  if (!on_emulator()) return;
  ASSERT_EQ(mmap(was, kBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0),
            was);
  std::string reason;
  EXPECT_TRUE(cuda_register_host(was, kBytes, &reason)) << reason;
  cuda_unregister_host(was);
  munmap(was, kBytes);
}

TEST(MachineMemoryOfGpus, IsFilledByOneAndRegisteredByAll) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 3}, share));
}

// As on a driver that only registers what may be written: mapped so for that moment.
TEST(MachineMemoryOfGpus, IsRegisteredWhereReadOnlyMemoryCannotBe) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 3, .variables = {"EMULATOR_NO_READ_ONLY=1"}}, [](GpuRank& rank) {
    if (on_emulator()) {
      EXPECT_FALSE(cuda_registers_read_only());
    }
    share(rank);
  }));
}

// What the GPU of another rank wrote would change the weights of all.
TEST(MachineMemoryOfGpus, IsWrittenByNoOtherRank) {
  LM_NEEDS_GPU();
  if (!on_emulator()) GTEST_SKIP() << "what a GPU does that writes to read-only memory is its driver's";
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    MachineMemory memory(rank.peers, 2);
    const std::span<std::byte> bytes = memory.map(kBytes, DeviceType::kCuda);
    const Memory device(DeviceType::kCuda, 4096);
    const auto write = [&] { copy_bytes(bytes.data(), device.data(), 4096, rank.compute); };
    if (memory.first()) {
      write();
      synchronize(rank.compute);
    } else {
      EXPECT_THROW(write(), Error);
    }
    memory.filled();
  }));
}

// Copies work without it, and the caller says what they cost.
TEST(MachineMemoryOfGpus, SaysWhyItIsNotRegistered) {
  LM_NEEDS_GPU();
  if (!on_emulator()) GTEST_SKIP() << "a GPU's driver registers it";
  expect_good_ends(with_gpus({.ranks = 2, .variables = {"EMULATOR_NO_PIN=1"}}, [](GpuRank& rank) {
    MachineMemory memory(rank.peers, 2);
    const std::span<std::byte> bytes = memory.map(kBytes, DeviceType::kCuda);
    EXPECT_NE(memory.refusal(), "");
    if (memory.first()) fill(rank, bytes);
    memory.filled();
    EXPECT_TRUE(read(rank, bytes) == pattern());
  }));
}

}  // namespace
}  // namespace lm
