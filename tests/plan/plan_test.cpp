#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "base/bytes.h"
#include "plan/estimate.h"
#include "shapes.h"

namespace lm {

// Steps that were walked. The linker sends the calls of `estimate` here (CMakeLists.txt).
static int estimates = 0;
#define LM_ESTIMATE "_ZN2lm8estimateERKNS_9PlanInputERKNS_9SizedPlanE"
PlanCost estimate_itself(const PlanInput&, const SizedPlan&) asm("__real_" LM_ESTIMATE);
PlanCost counted_estimate(const PlanInput&, const SizedPlan&) asm("__wrap_" LM_ESTIMATE);
PlanCost counted_estimate(const PlanInput& in, const SizedPlan& plan) {
  ++estimates;
  return estimate_itself(in, plan);
}

namespace {

TEST(Plan, KnowsTheBytesOfLlama1B) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  const Plan plan = c.plan();
  const ModelLayout layout = c.layout(nullptr);
  EXPECT_EQ(layout.trainable_elements, 1'235'814'400);
  const int64_t flat = layout.flat_elements;
  EXPECT_LT(flat - layout.trainable_elements, 18 * 2 * 4096);
  EXPECT_EQ(class_bytes(plan, "weights"), flat * 2);
  EXPECT_EQ(class_bytes(plan, "frozen weights"), 0);
  EXPECT_EQ(class_bytes(plan, "gradients"), flat * 4);
  EXPECT_EQ(class_bytes(plan, "master"), flat * 2);
  EXPECT_EQ(class_bytes(plan, "first moment"), flat * 4);
  EXPECT_EQ(class_bytes(plan, "second moment"), flat * 4);
  // 8 sequences of 2048 tokens: at most 16,384 distinct rows.
  EXPECT_EQ(class_bytes(plan, "embedding rows"), 16384LL * 2048 * 4);
  EXPECT_EQ(plan.peak.device, 0);
  EXPECT_EQ(plan.peak.disk, 0);
  EXPECT_GT(plan.peak.host, flat * 16);
}

TEST(Plan, HasSaveBuffersForARunThatTrains) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  EXPECT_EQ(class_bytes(c.plan(), "save buffers"), 12 * kMiB) << "state is written from where it lies";
  // Of a small model as many as its state fills.
  Case small{.spec = make_spec({64, 160, 2, 4, 2, 16, 20000}, false)};
  for (Case* one : {&c, &small}) one->config.optimizer.clip = Clip::kBlock;
  EXPECT_EQ(class_bytes(c.plan(), "save buffers"), 64 * kMiB) << "the next updates come before a check";
  EXPECT_EQ(class_bytes(small.plan(), "save buffers"),
            ceil_div(small.layout(nullptr).flat_elements * 12 + kMiB, 4 * kMiB) * 4 * kMiB);
  // Of several ranks each saves its part.
  small.world.ranks = 2, small.config.train.global_batch = 16;
  EXPECT_EQ(class_bytes(small.plan(), "save buffers"),
            ceil_div(small.layout(nullptr).flat_elements * 6 + kMiB, 4 * kMiB) * 4 * kMiB);
  c.config.optimizer.clip = Clip::kGlobal;
  c.config.offload.optimizer = OffloadTier::kNvme;
  EXPECT_EQ(class_bytes(c.plan(), "save buffers"), 64 * kMiB) << "slots are used again";
  c.purpose = PlanPurpose::kEvaluate;
  EXPECT_EQ(class_bytes(c.plan(), "save buffers"), -1);
}

TEST(Plan, KnowsTheBytesOfSmolLM2WithLora) {
  Case c;
  c.config.train.method = Method::kLora;
  const Plan plan = c.plan();
  // 30 layers x 16 x (in + out) of the seven projections.
  const int64_t lora = 30LL * 16 * (4 * 576 + 576 + 2 * 192 + 576 + 3 * (576 + 1536));
  const AdapterSpec adapter = adapter_r16();
  const ModelLayout layout = c.layout(&adapter);
  EXPECT_EQ(layout.trainable_elements, lora);
  EXPECT_EQ(layout.frozen_elements, 134'515'008);
  EXPECT_EQ(class_bytes(plan, "frozen weights"), layout.frozen_bytes);
  EXPECT_EQ(class_bytes(plan, "first moment"), layout.flat_elements * 4);
  EXPECT_EQ(class_bytes(plan, "embedding rows"), 0);
}

TEST(Plan, HasOneMasterPerChoice) {
  Case c;
  const int64_t flat = c.layout(nullptr).flat_elements;
  c.config.optimizer.master = Master::kF32;
  EXPECT_EQ(class_bytes(c.plan(), "master"), flat * 4);
  c.config.optimizer.master = Master::kNone;
  EXPECT_EQ(class_bytes(c.plan(), "master"), -1);  // no such row
  c.config.optimizer.master = Master::kSplit;
  c.config.model.dtype = ModelDType::kF32;
  EXPECT_EQ(class_bytes(c.plan(), "master"), -1);
  EXPECT_EQ(class_bytes(c.plan(), "weights"), flat * 4);
}

TEST(Plan, AddsUpToItsPeak) {
  for (const bool gpu : {false, true}) {
    Case c;
    if (gpu) c.machine = gpu_machine("H200"), c.device = DeviceType::kCuda;
    const Plan plan = c.plan();
    int64_t device = 0, host = 0;
    for (const ClassBytes& row : plan.classes) (row.tier_id == TierId::kDevice ? device : host) += row.bytes;
    EXPECT_EQ(plan.peak.device, device);
    EXPECT_EQ(plan.peak.host, host);
    EXPECT_EQ(plan.tiers.size(), gpu ? 2 : 1);
    EXPECT_EQ(plan.tiers.front().tier_id, gpu ? TierId::kDevice : TierId::kHost);
    EXPECT_EQ(plan.placement.tier_id[0], plan.tiers.front().tier_id);
    EXPECT_GE(class_bytes(plan, "temporaries"), plan.arena.logits);
  }
}

TEST(Plan, NeedsMoreForLargerMicroBatchesAndLessWithRecomputation) {
  Case c{.machine = cpu_machine(512)};
  c.config.train.recompute = Recompute::kNone;
  int64_t last = 0;
  for (const int64_t m : {1, 2, 4, 8}) {
    c.config.train.micro_batch = m;
    c.config.train.recompute = Recompute::kNone;
    const Plan none = c.plan();
    c.config.train.recompute = Recompute::kBlock;
    const Plan block = c.plan();
    EXPECT_GT(none.peak.host, last);
    EXPECT_LT(block.peak.host, none.peak.host);
    EXPECT_GT(block.step_seconds, none.step_seconds);
    EXPECT_EQ(none.numerics.micro_batches, 8 / m);
    last = none.peak.host;
  }
}

TEST(Plan, ChoosesAMicroBatchThatFitsAndDivides) {
  std::mt19937 random(4);
  int planned = 0;
  for (int i = 0; i < 200; ++i) {
    Case c;
    stay_near(c.config);
    c.config.train.global_batch = std::uniform_int_distribution<int64_t>(1, 96)(random);
    c.config.data.max_length = 64 << std::uniform_int_distribution<int>(0, 7)(random);
    c.machine = cpu_machine(std::uniform_int_distribution<int64_t>(2, 12)(random));
    if (i % 2 == 1) {
      c.device = DeviceType::kCuda;
      c.machine.gpus.push_back(built_in_gpu("3090"));
      c.machine.gpus[0].memory_bytes = std::uniform_int_distribution<int64_t>(4, 24)(random) << 30;
      c.machine.host_memory = 64LL << 30;
    }
    const Plan plan = c.draft();
    const NumericsPlan& n = plan.numerics;
    EXPECT_EQ(c.config.train.global_batch % n.micro_batch, 0);
    EXPECT_EQ(n.micro_batch * n.micro_batches, c.config.train.global_batch);
    if (n.micro_batch > 1) {
      EXPECT_LE(plan.micro_tokens, i % 2 == 1 ? 16384 : 2048);
      EXPECT_TRUE(plan.fits);
    }
    planned += plan.fits;
    if (!plan.fits || plan.recompute() != Recompute::kNone) continue;
    // The next larger divisor would break the cap or the memory.
    for (int64_t m = n.micro_batch + 1; m <= c.config.train.global_batch; ++m) {
      if (c.config.train.global_batch % m != 0) continue;
      if (m * c.config.data.max_length > (i % 2 == 1 ? 16384 : 2048)) break;
      c.config.train.micro_batch = m;
      c.config.train.recompute = Recompute::kNone;
      EXPECT_FALSE(c.draft().fits);
      break;
    }
  }
  EXPECT_GT(planned, 100);
}

TEST(Plan, RecomputesOnlyWhereItMust) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  stay_near(c.config);
  EXPECT_EQ(c.plan().recompute(), Recompute::kNone);
  int recomputed = 0;
  for (int64_t bytes = 34LL << 30; bytes > 18LL << 30; bytes -= 1LL << 28) {
    c.config.train.recompute = Recompute::kAuto;
    c.machine.gpus[0].memory_bytes = bytes;
    const Plan plan = c.draft();
    if (plan.recompute() == Recompute::kNone || !plan.fits) continue;
    ++recomputed;
    c.config.train.recompute = Recompute::kNone;
    EXPECT_FALSE(c.draft().fits);
  }
  EXPECT_GT(recomputed, 0);
}

TEST(Plan, TellsTheReasonOfEveryAuto) {
  Case c;
  const auto reason = [](const Plan& plan, const std::string& key) -> std::string {
    for (const Choice& choice : plan.choices) {
      if (choice.key == key) return choice.value + ": " + choice.reason;
    }
    return "";
  };
  const Plan automatic = c.plan();
  for (const char* key : {"train.micro_batch", "train.recompute", "run.threads", "optimizer.threads"}) {
    EXPECT_NE(reason(automatic, key), "") << key;
  }
  c.config.train.micro_batch = 2;
  c.config.train.recompute = Recompute::kBlock;
  c.config.run.threads = 3;
  c.config.optimizer.threads = 1;
  const Plan given = c.plan();
  EXPECT_TRUE(given.choices.empty());
  EXPECT_EQ(given.numerics.threads, 3);
  EXPECT_EQ(given.placement.optimizer_threads, 1);
  EXPECT_EQ(given.numerics.micro_batch, 2);
  EXPECT_TRUE(given.numerics.recompute.whole());
}

TEST(Plan, LetsNumericsDependOnCapacitiesAlone) {
  Case idle{.machine = cpu_machine(16)};
  Case busy = idle;
  busy.machine.host_available = 1LL << 30;
  busy.machine.gemm_bf16_flops = 0;
  busy.machine.memory_bandwidth = 1e9;
  const Plan a = idle.draft(), b = busy.draft();
  EXPECT_TRUE(a.fits);
  EXPECT_FALSE(b.fits);
  EXPECT_EQ(a.numerics.micro_batch, b.numerics.micro_batch);
  EXPECT_EQ(a.numerics.recompute, b.numerics.recompute);
  EXPECT_EQ(a.numerics.row_chunk, b.numerics.row_chunk);
  EXPECT_EQ(a.peak.host, b.peak.host);
  Case limited = idle;
  limited.machine.host_limit = 1LL << 30;
  EXPECT_FALSE(limited.draft().fits);
}

TEST(Plan, ChoosesTheSameMicroBatchWhateverOffloadMayTake) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.train.global_batch = 16;
  c.config.data.max_length = 512;
  c.config.offload.paths = {"/disk"};
  c.machine.disks.push_back({"/disk", 1LL << 40, 3e9, 2e9});
  const Plan free = c.plan();
  EXPECT_EQ(free.numerics.micro_batch, 4);
  int limited = 0;
  for (int64_t bytes = 24LL << 30; bytes > 8LL << 30; bytes -= 1LL << 29) {
    for (const OffloadTier optimizer : {OffloadTier::kAuto, OffloadTier::kNvme}) {
      c.config.offload.host_memory = {bytes, 0};
      c.config.offload.optimizer = optimizer;
      const Plan plan = c.draft();
      if (!plan.fits) continue;
      EXPECT_EQ(plan.numerics.micro_batch, free.numerics.micro_batch) << bytes;
      limited += plan.peak.host < free.peak.host;
    }
  }
  EXPECT_GT(limited, 10);
}

// They are measured when a run begins: its bits must not follow.
TEST(Plan, ChoosesTheSameMicroBatchWhateverLibrariesTake) {
  Case c{.spec = llama_1b()};
  c.config.train.global_batch = 16;
  c.config.data.max_length = 512;
  int changed = 0;
  for (int64_t gib = 8; gib <= 64; gib += 2) {
    c.machine = cpu_machine(gib);
    const Plan assumed = c.draft();
    c.machine.library_bytes = 4LL << 30;
    const Plan more = c.draft();
    EXPECT_TRUE(more.numerics == assumed.numerics) << gib;
    EXPECT_GT(more.peak.host, assumed.peak.host) << gib;
    changed += more.fits != assumed.fits;
  }
  EXPECT_GT(changed, 0);
}

TEST(Plan, SaysSoWhereALimitOfOffloadDecidesTheMicroBatch) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.global_batch = 16;
  c.config.data.max_length = 512;
  const Plan free = c.plan();
  c.config.train.update = UpdateTime::kAfter;
  int smaller = 0;
  for (int64_t bytes = free.peak.host; bytes > free.peak.host / 2; bytes -= 1LL << 24) {
    c.config.offload.host_memory = {bytes, 0};
    const Plan plan = c.draft();
    if (!plan.fits || plan.numerics.micro_batch == free.numerics.micro_batch) continue;
    ++smaller;
    Case pinned = c;
    pinned.config.train.micro_batch = free.numerics.micro_batch;
    EXPECT_FALSE(pinned.draft().fits) << bytes;
    const auto said = std::ranges::find(plan.choices, "train.micro_batch", &Choice::key);
    ASSERT_NE(said, plan.choices.end());
    EXPECT_NE(said->reason.find("losses differ"), std::string::npos) << said->reason;
  }
  EXPECT_GT(smaller, 0);
}

TEST(Plan, TakesRowChunksThatFitTheGpu) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  EXPECT_EQ(c.plan().numerics.row_chunk, 4096);
  c.machine.gpus[0].memory_bytes = 40LL << 30;
  const Plan plan = c.plan();
  EXPECT_EQ(plan.numerics.row_chunk, 4096);
  EXPECT_LE(plan.arena.logits, (40LL << 30) / 32);
  c.machine.gpus[0].memory_bytes = 24LL << 30;
  EXPECT_EQ(c.draft().numerics.row_chunk, 2048);
}

// Device, host memory, disk: of a class on `auto` each keeps what fits, the earliest arrays nearest.
TEST(Plan, FillsHostMemoryBeforeTheDisk) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.data.max_length = 2048;
  c.config.train.gradients = GradientDType::kBF16;
  c.config.offload.paths = {"/scratch"};
  c.machine.host_memory = 96LL << 30;
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  const Plan plan = c.plan();
  const PoolPlan& pool = plan.placement.pool(Pool::kOptimizer);
  ASSERT_EQ(pool.tier_id, TierId::kNvme);
  const int64_t host = pool.off_device_bytes(TierId::kHost), disk = pool.off_device_bytes(TierId::kNvme);
  EXPECT_GT(host, int64_t{1} << 30);
  EXPECT_GT(disk, int64_t{1} << 30);
  EXPECT_EQ(host + disk, pool.off_device_bytes());
  EXPECT_GE(plan.swap_spare, disk / 100);
  EXPECT_EQ(plan.peak.disk, disk + plan.swap_spare);
  const Tier& memory = plan.tiers[1];
  EXPECT_LE(memory.bytes, memory.usable);
  EXPECT_GT(memory.bytes, memory.usable - (int64_t{256} << 20));
  // Only what is on disk crosses its link.
  EXPECT_NEAR(plan.timeline.disk_read_bytes, static_cast<double>(disk), 1e-3 * static_cast<double>(disk));
}

// A frozen block has no state, and no update that could look for some.
TEST(Plan, UpdatesTilesThatThereAre) {
  for (const Method method : {Method::kFull, Method::kLora}) {
    Case c{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
    c.config.train.method = method;
    const Plan plan = c.plan();
    const StepConfig& step = plan.step;
    std::vector<int> updates(static_cast<size_t>(step.first_tile.back()));
    for (const Operation& op : make_schedule(step).operations) {
      if (op.kind != OperationKind::kUpdate) continue;
      ASSERT_LT(step.tile_array(op.unit, op.tile), step.first_tile.back()) << "unit " << op.unit;
      ++updates[static_cast<size_t>(step.tile_array(op.unit, op.tile))];
    }
    EXPECT_EQ(updates, std::vector<int>(updates.size(), 1));
  }
}

// What memory has room for needs no disk: a limit is met by what is left, not by whole classes.
TEST(Plan, MeetsADiskLimitThatIsLessThanWholeClasses) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.train.gradients = GradientDType::kBF16;
  c.config.train.global_batch = 64;
  c.config.offload.paths = {"/scratch"};
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  const Plan free = c.plan();
  const int64_t needed = free.peak.disk - free.swap_spare;
  ASSERT_GT(needed, 1LL << 30);
  for (int64_t limit = needed; limit > needed * 9 / 10; limit -= 1LL << 30) {
    c.config.offload.disk_limit = Budget{limit, 0};
    const Plan plan = c.draft();
    EXPECT_TRUE(plan.fits || limit < needed);
    if (!plan.fits) continue;
    EXPECT_LE(plan.peak.disk, limit);
    EXPECT_EQ(plan.numerics.micro_batch, free.numerics.micro_batch);
    EXPECT_EQ(plan.numerics.recompute, free.numerics.recompute);
  }
}

// What staging would take of host memory holds state before a run is refused.
TEST(Plan, StagesLessWhereTheDiskIsSmall) {
  Case c{.spec = llama_1b()};
  c.config.offload.paths = {"/scratch"};
  c.machine = cpu_machine(12);
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  const Plan free = c.plan();
  ASSERT_GT(free.peak.disk, 0);
  c.config.offload.disk_limit = Budget{free.peak.disk - free.swap_spare - (64LL << 20), 0};
  const Plan less = c.draft();
  EXPECT_TRUE(less.fits);
  EXPECT_LT(less.peak.disk, free.peak.disk);
  EXPECT_LT(less.placement.pool(Pool::kOptimizer).slots, free.placement.pool(Pool::kOptimizer).slots);
}

TEST(Plan, CountsADiskLimitForEachPath) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(8)};
  c.config.offload.paths = {"/a", "/b"};
  c.config.offload.optimizer = c.config.offload.gradients = OffloadTier::kNvme;
  c.machine.disks = {{.path = "/a", .free_bytes = 1LL << 40}, {.path = "/b", .free_bytes = 1LL << 32}};
  const Plan free = c.plan();
  const int64_t needed = free.peak.disk - 2 * free.swap_spare;  // of each path
  ASSERT_GT(needed, 2LL << 32);
  c.config.offload.disk_limit = Budget{needed - (1LL << 32), 0};
  EXPECT_TRUE(c.draft().fits);
  c.config.offload.disk_limit->bytes -= 1;
  EXPECT_FALSE(c.draft().fits);
  c.config.offload.disk_limit = Budget{0, 0.5};
  EXPECT_TRUE(c.draft().fits);
}

// The embedding leaves the device with the weights, and without a slot, unless it is the head's matrix too.
TEST(Plan, LooksTheEmbeddingUpAtItsTier) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.train.gradients = GradientDType::kBF16;
  c.config.offload.optimizer = c.config.offload.gradients = c.config.offload.weights = OffloadTier::kHost;
  c.machine.host_memory = 256LL << 30;
  const Plan plan = c.plan();
  const int64_t bytes = c.layout(nullptr).blocks.front().flat_elements * 2;
  EXPECT_EQ(plan.placement.embedding_in_host, bytes);
  EXPECT_EQ(class_bytes(plan, "embedding"), bytes);
  int64_t weights = 0;  // at all tiers
  for (const ClassBytes& row : plan.classes) weights += row.name == "weights" ? row.bytes : 0;
  EXPECT_EQ(weights + bytes, c.layout(nullptr).flat_elements * 2);
  EXPECT_EQ(plan.placement.pool(Pool::kWeights).bytes.front(), 0);
  c.spec.tied = true;
  EXPECT_EQ(c.plan().placement.embedding_in_host, 0);
}

TEST(Plan, IsPure) {
  const Case c;
  EXPECT_EQ(plan_json(c.plan()), plan_json(c.plan()));
  EXPECT_EQ(print_plan(c.plan()), print_plan(c.plan()));
}

TEST(PlanText, AgreesWithItsJson) {
  for (const bool gpu : {false, true}) {
    Case c;
    if (gpu) c.machine = gpu_machine("H200"), c.device = DeviceType::kCuda;
    const Plan plan = c.plan();
    const std::string table = print_plan(plan);
    const nlohmann::json json = nlohmann::json::parse(plan_json(plan));
    EXPECT_EQ(json["fits"], true);
    EXPECT_EQ(json["peak"]["host_bytes"], plan.peak.host);
    EXPECT_EQ(json["peak"]["device_bytes"], plan.peak.device);
    EXPECT_EQ(json["peak"]["disk_bytes"], 0);
    EXPECT_DOUBLE_EQ(json["step_seconds"].get<double>(), plan.step_seconds);
    EXPECT_NE(table.find("bound by " + json["binding"].get<std::string>()), std::string::npos);
    double seconds = 0;
    for (const auto& link : json["links"]) seconds += link["seconds"].get<double>();
    EXPECT_NEAR(seconds, plan.step_seconds, 1e-9 * seconds);
    for (const auto& tier : json["tiers"]) {
      int64_t bytes = 0;
      for (const auto& row : tier["classes"]) {
        bytes += row["bytes"].get<int64_t>();
        if (row["bytes"] == 0) continue;
        EXPECT_NE(table.find(row["name"].get<std::string>()), std::string::npos);
        EXPECT_NE(table.find(format_bytes(row["bytes"].get<int64_t>())), std::string::npos);
      }
      EXPECT_EQ(bytes, tier["bytes"].get<int64_t>());
    }
    for (const Choice& choice : plan.choices) EXPECT_NE(table.find(choice.key), std::string::npos);
  }
}

TEST(PlanText, SaysWhatDoesNotFit) {
  const Case c{.spec = llama_8b()};
  const Plan plan = c.draft();
  EXPECT_NE(print_plan(plan).find("DOES NOT FIT"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(plan_json(plan))["fits"], false);
}

// With a small GPU and a disk there is no candidate of tiers that is not tried. To walk a step takes longer
// than to place a candidate: that is done for the one that is chosen, with its update on the GPU, on the CPU,
// and as it is planned in the end.
TEST(Plan, OfEightBillionParametersWalksThreeSteps) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.train.global_batch = 16;
  c.config.offload.paths = {"/scratch"};
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  c.config.train.recompute = Recompute::kBlock;
  estimates = 0;
  c.plan();
  EXPECT_EQ(estimates, 3);
  // The levels of recomputation that fit are compared: each with its update there and there, and as planned.
  c.config.train.recompute = Recompute::kAuto;
  estimates = 0;
  c.plan();
  EXPECT_LE(estimates, 3 + 3 * 6);
}

}  // namespace
}  // namespace lm
