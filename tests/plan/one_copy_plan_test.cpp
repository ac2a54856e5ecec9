// Plans of what is frozen and lies in host memory, of which the ranks of a machine have one copy.
#include <gtest/gtest.h>

#include <string>

#include "base/bytes.h"
#include "plan/unit_pools.h"
#include "shapes.h"

namespace lm {
namespace {

// On the CPU, which computes with them where they are; in shards each rank has its own part already.
TEST(RanksPlan, RanksOfAMachineHaveOneCopyOfWhatIsFrozen) {
  Case c = stage_case(1, 8);
  c.config.train.method = Method::kLora;
  const int64_t all = c.layout(&c.lora).frozen_bytes;
  const Plan one = c.plan();
  EXPECT_EQ(class_bytes(one, "frozen weights"), all / 8);
  EXPECT_NE(print_plan(one).find("one copy for the 8 ranks of a machine"), std::string::npos);
  c.world.nodes = 4;
  EXPECT_EQ(class_bytes(c.plan(), "frozen weights"), all / 2);
  c.config.zero.stage = 3;
  const Plan shards = c.plan();
  const int64_t embedding = c.layout(&c.lora).blocks.front().frozen_bytes;
  EXPECT_LT(class_bytes(shards, "frozen weights"), embedding / 2 + kMiB);
  c.config.zero.stage = 1;
  for (int own = 0; own < 4; ++own) {
    Case other = c;
    if (own == 0) other.world.share_memory = false;
    if (own == 1) other.world.by_machine = false;
    if (own == 2) other.world.nodes = other.world.ranks;
    if (own == 3) other.purpose = PlanPurpose::kEvaluate;
    const Plan plan = other.plan();
    EXPECT_EQ(class_bytes(plan, "frozen weights"), all) << own;
    EXPECT_EQ(print_plan(plan).find("one copy"), std::string::npos) << own;
  }
  Case rows = c;
  rows.lora.tokens = {5};
  const ModelLayout with_rows = rows.layout(&rows.lora), without = c.layout(&c.lora);
  EXPECT_EQ(class_bytes(rows.plan(), "frozen weights"), with_rows.frozen_bytes);
  // The worker asks before it makes the memory.
  const PlanInputs own{rows.config, rows.spec, &rows.lora, with_rows, rows.device},
      one_for_all{c.config, c.spec, &c.lora, without, c.device};
  EXPECT_FALSE(may_share_frozen(own, PlanPurpose::kTrain));
  EXPECT_TRUE(may_share_frozen(one_for_all, PlanPurpose::kTrain));
  EXPECT_FALSE(may_share_frozen(one_for_all, PlanPurpose::kEvaluate));
  c.device = DeviceType::kCuda;
  c.machine = gpu_machine("H100");
  // On GPUs each has its own, whatever is shared off them.
  EXPECT_EQ(class_bytes(c.plan(), "frozen weights"), all);
  EXPECT_EQ(print_plan(c.plan()).find("one copy"), std::string::npos);
}

int64_t bytes_in_host(const Plan& plan, const std::string& name) {
  int64_t sum = 0;
  for (const ClassBytes& row : plan.classes)
    sum += row.name == name && row.tier_id == TierId::kHost ? row.bytes : 0;
  return sum;
}

// Adapters of a model with an untied head, whose base 8 GPUs fetch from host memory.
Case base_in_host(int64_t stage) {
  Case c = stage_case(stage, 8, llama_8b());
  c.device = DeviceType::kCuda;
  c.machine = gpu_machine("H100");
  c.config.train.method = Method::kLora;
  c.config.offload.weights = OffloadTier::kHost;
  return c;
}

// Blocks and the head's segments are fetched from it, and rows of the embedding are read where they lie.
TEST(RanksPlan, RanksOfGpusHaveOneCopyOfABaseInHostMemory) {
  Case c = base_in_host(1), own = c;
  own.world.share_memory = false;
  const Plan one = c.plan(), each = own.plan();
  const int64_t embedding = c.layout(&c.lora).blocks.front().frozen_bytes;
  EXPECT_EQ(bytes_in_host(one, "embedding") * 8, embedding);
  EXPECT_EQ(bytes_in_host(each, "embedding"), embedding);
  const int64_t blocks = bytes_in_host(each, "frozen weights");
  EXPECT_GT(blocks, 13 * kGiB);
  EXPECT_EQ(bytes_in_host(one, "frozen weights") * 8, blocks);
  // The rank that fills them leaves their checksums there, 8 bytes of 8192.
  EXPECT_EQ(bytes_in_host(one, "checksums") - bytes_in_host(each, "checksums"), blocks / 1024 / 8);
  EXPECT_EQ(one.peak.host, each.peak.host - (blocks + embedding) * 7 / 8 + blocks / 1024 / 8);
  EXPECT_EQ(one.peak.device, each.peak.device);
  EXPECT_NE(print_plan(one).find("one copy for the 8 ranks of a machine"), std::string::npos);
  EXPECT_EQ(print_plan(each).find("one copy"), std::string::npos);
  // In shards each rank has its own part, and the embedding is whole.
  const Plan shards = base_in_host(3).plan();
  EXPECT_NEAR(static_cast<double>(bytes_in_host(shards, "frozen weights")) * 8, static_cast<double>(blocks),
              4e6);  // whole chunks of each array
  EXPECT_EQ(bytes_in_host(shards, "embedding") * 8, embedding);
  c.lora.tokens = {1, 2};  // whose rows are written into the table
  EXPECT_EQ(bytes_in_host(c.plan(), "frozen weights"), blocks);
}

// Disks have what one copy leaves no room for, and less of it than beside a copy for each rank.
TEST(RanksPlan, OneCopyOfABaseBesideGpusLeavesRoomForMoreOfIt) {
  int fewer = 0;
  for (int64_t gib = 4; gib <= 16; gib += 2) {
    Case c = base_in_host(1);
    c.config.offload.weights = OffloadTier::kAuto;
    c.config.offload.paths = {"d"};
    c.config.data.max_length = 128;
    c.machine.disks = {{"d", 1'000 * kGiB, 3e9, 2e9, 4e9}};
    c.machine.host_memory = gib * kGiB;
    c.machine.gpus.front().memory_bytes = 10 * kGiB;
    Case own = c;
    own.world.share_memory = false;
    const Plan one = c.draft(), each = own.draft();
    if (!each.fits) continue;
    EXPECT_TRUE(one.fits) << gib;
    EXPECT_LE(one.peak.disk, each.peak.disk) << gib;
    fewer += one.peak.disk < each.peak.disk ? 1 : 0;
  }
  EXPECT_GT(fewer, 0);
}

}  // namespace
}  // namespace lm
