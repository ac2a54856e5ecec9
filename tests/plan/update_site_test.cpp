// Who updates state that is in host memory beside a GPU: the CPU where it lies, the GPU through slots, or
// both.
#include <gtest/gtest.h>

#include <algorithm>

#include "shapes.h"

namespace lm {
namespace {

// State in host memory beside a GPU: fast memory updates it where it lies, slow memory lends it to the GPU.
TEST(UpdateSite, ChoosesWhoUpdatesStateOffTheGpu) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.offload.optimizer = OffloadTier::kHost;
  c.machine.memory_bandwidth = 1e9;  // too slow for a share, too
  ASSERT_FALSE(c.plan().placement.update_on_host);
  c.update_on_host = false;
  const Plan gpu = c.plan();
  c.machine.memory_bandwidth = 400e9;
  c.update_on_host = true;
  const Plan cpu = c.plan();
  ASSERT_TRUE(cpu.placement.update_on_host);
  EXPECT_FALSE(cpu.placement.shares_updates());
  EXPECT_LT(cpu.step_seconds, gpu.step_seconds);
  const auto flat = static_cast<double>(c.layout(nullptr).flat_elements);
  EXPECT_EQ(cpu.timeline.link_bytes, flat * (4 + 2 + 2));  // gradient and weight down, weight up
  EXPECT_EQ(gpu.timeline.link_bytes, flat * 2 * 10);       // m, v and low half both ways
  // The same state in host memory; nothing of it passes through the device, every block waits for its tiles.
  for (const char* name : {"master", "first moment", "second moment"})
    EXPECT_EQ(class_bytes(cpu, name), class_bytes(gpu, name)) << name;
  EXPECT_FALSE(cpu.step.uses_slots());
  EXPECT_TRUE(cpu.step.defers());
  EXPECT_LT(cpu.peak.device, gpu.peak.device);
  EXPECT_EQ(class_bytes(cpu, "update staging"), cpu.placement.update_staging);
  EXPECT_GT(cpu.placement.update_staging, 0);
}

// A server's CPU takes a part of the updates of three layers of 8B, so that less state crosses the link.
TEST(UpdateSite, CpuAndGpuShareUpdatesOfStateInHostMemory) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  c.spec.layers.resize(3);
  c.machine.host_memory = int64_t{512} << 30;
  c.machine.cores = 16;
  c.machine.memory_bandwidth = 104e9;  // 4e9 parameters a second, of 26 bytes each
  c.machine.gpus[0].link_bandwidth = 50.1e9;
  c.config.data.max_length = 2048;
  c.config.train.global_batch = 8, c.config.train.micro_batch = 8;
  c.config.train.gradients = GradientDType::kBF16;
  c.config.offload.optimizer = OffloadTier::kHost;
  const Plan shared = c.plan();
  ASSERT_TRUE(shared.placement.shares_updates());
  c.update_on_host = false;
  const Plan gpu = c.plan();
  c.update_on_host = true;
  const Plan cpu = c.plan();
  EXPECT_LT(shared.step_seconds, 0.95 * std::min(gpu.step_seconds, cpu.step_seconds));
  EXPECT_LT(shared.timeline.link_bytes, gpu.timeline.link_bytes);
  EXPECT_LT(shared.timeline.host_seconds, cpu.timeline.host_seconds);
  // Each array has one of both; slots are the GPU's alone, and state is in host memory either way.
  const PlacementPlan& p = shared.placement;
  const std::vector<char> through = p.through_slots(Pool::kOptimizer);
  const PoolPlan& pool = p.pool(Pool::kOptimizer);
  for (size_t a = 0; a < through.size(); ++a)
    EXPECT_EQ(through[a] + (p.host_updates(a) ? 1 : 0), pool.off_device[a]) << a;
  EXPECT_GT(pool.slots, 0);
  for (const ClassBytes& row : shared.classes) {
    if (row.name != "optimizer slots") continue;
    EXPECT_EQ(row.bytes, pool.slots * pool.slot_bytes);
    EXPECT_EQ(row.tier_id, TierId::kDevice);
  }
  for (const char* name : {"master", "first moment", "second moment"})
    EXPECT_EQ(class_bytes(shared, name), class_bytes(gpu, name)) << name;
}

}  // namespace
}  // namespace lm
