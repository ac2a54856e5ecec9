// Plans for several ranks: what each has, what they send, how they scale, and the estimate against a
// simulation of all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "base/bytes.h"
#include "plan/scaling.h"
#include "plan/traffic.h"
#include "shapes.h"
#include "tests/support/counts.h"
#include "tests/support/oracles/simulate.h"

namespace lm {
namespace {

// Within a granule of every unit.
void expect_share(const Plan& plan, const std::string& name, const Plan& whole, int ranks) {
  const auto share = static_cast<double>(class_bytes(whole, name)) / ranks;
  EXPECT_NEAR(static_cast<double>(class_bytes(plan, name)) / share, 1, 0.01) << name;
}

TEST(RanksPlan, MemoryFallsAsAStagePromises) {
  for (const int ranks : {2, 4, 8}) {
    const Plan whole = stage_case(0, ranks).plan();
    for (const char* name : {"master", "first moment", "second moment"}) {
      EXPECT_EQ(class_bytes(whole, name), class_bytes(stage_case(0, 1).plan(), name));
      for (const int64_t stage : {1, 2, 3}) expect_share(stage_case(stage, ranks).plan(), name, whole, ranks);
    }
    EXPECT_EQ(class_bytes(stage_case(1, ranks).plan(), "gradients"), class_bytes(whole, "gradients"));
    EXPECT_EQ(class_bytes(stage_case(2, ranks).plan(), "weights"), class_bytes(whole, "weights"));
    // The embedding, here the head's matrix too, is whole on every rank; so is the final norm.
    const Case c = stage_case(3, ranks);
    const ModelLayout layout = c.layout(nullptr);
    const int64_t here = layout.blocks.front().flat_elements + layout.blocks.back().flat_elements,
                  shared = layout.flat_elements - here;
    const Plan third = c.plan();
    for (const auto& [name, size] : {std::pair("gradients", 4), std::pair("weights", 2)}) {
      const double want = static_cast<double>((here + shared / ranks) * size);
      EXPECT_NEAR(static_cast<double>(class_bytes(third, name)) / want, 1, 0.01) << name;
    }
    EXPECT_EQ(class_bytes(third, "shared memory"), ranks * 8 * kMiB);
  }
  EXPECT_EQ(class_bytes(stage_case(3, 1).plan(), "shared memory"), -1);
}

// Resident of a rank: its own messages, and of the others' what it reads.
TEST(RanksPlan, ARankHasResidentWhatItSendsAndReads) {
  Case c = stage_case(1, 4, smollm2_135m());
  c.config.train.method = Method::kLora;
  const ModelLayout layout = c.layout(&c.lora);
  int64_t longest = 0;  // of adapters, a rank's shard
  for (const BlockLayout& block : layout.blocks) longest = std::max(longest, block.flat_elements);
  const int64_t shard = round_up(ceil_div(longest, kGranule), 4) / 4 * kGranule;
  EXPECT_LT(shard * 4, kMiB);
  // Each half of a rank's memory: gradients of every rank's shard in fp32, a mebibyte apart, and in the first
  // one's place the masters that are gathered; a rank reads its own shard's place and those masters.
  EXPECT_EQ(class_bytes(c.plan(), "shared memory"), 2 * shard * 4 * (4 + 3 * 2));
  // Shards that are longer than their place fill all of it.
  EXPECT_EQ(class_bytes(stage_case(0, 4).plan(), "shared memory"), 4 * 8 * kMiB);
  c.world.nodes = 4;
  EXPECT_EQ(class_bytes(c.plan(), "shared memory"), 8 * kMiB);
}

TEST(RanksPlan, ShardsOfGpusAreInTheirMemory) {
  Case c = stage_case(3, 8, llama_8b());
  c.machine = gpu_machine("H100");
  c.device = DeviceType::kCuda;
  const Plan plan = c.draft();
  for (const ClassBytes& row : plan.classes) {
    if (row.name == "weights" || row.name == "gradients") {
      EXPECT_EQ(row.tier_id, TierId::kDevice) << row.bytes;
    }
    EXPECT_NE(row.name, "checksums");
  }
  EXPECT_EQ(plan.timeline.link_bytes, 0);
}

// One rank has nobody to ask, whatever the stage.
TEST(RanksPlan, OneRankHasTheListOfStageZero) {
  for (const bool lora : {false, true}) {
    Case none = stage_case(0, 1), third = stage_case(3, 1);
    if (lora) none.config.train.method = third.config.train.method = Method::kLora;
    const Plan a = none.plan(), b = third.plan();
    const auto list = [](const Plan& plan) { return steady_steps(plan.step).back().operations; };
    EXPECT_EQ(list(a), list(b));
    EXPECT_EQ(print_plan(a), print_plan(b));
    for (const Operation& op : list(b)) {
      EXPECT_NE(op.kind, OperationKind::kReduceScatter);
      EXPECT_NE(op.kind, OperationKind::kGather);
      EXPECT_FALSE(is_transfer(op));
    }
  }
}

// Rings would send as much: 2 (N - 1)/N of the gradient without shards.
TEST(RanksPlan, TrafficIsWhatAStageNeeds) {
  for (const int ranks : {2, 4}) {
    const Plan none = stage_case(0, ranks).plan(), first = stage_case(1, ranks).plan();
    const auto flat = static_cast<double>(stage_case(0, ranks).layout(nullptr).flat_elements);
    const double rest = 1 - 1.0 / ranks;
    EXPECT_DOUBLE_EQ(none.traffic.gradient_bytes, 2 * 4 * rest * flat);
    EXPECT_EQ(none.traffic.weight_bytes, 0);
    EXPECT_DOUBLE_EQ(first.traffic.gradient_bytes, 4 * rest * flat);
    EXPECT_DOUBLE_EQ(first.traffic.weight_bytes, 2 * rest * flat);
    // A unit in shards is gathered for its forward and for its backward, and for nothing else.
    const double third = stage_case(3, ranks).plan().traffic.weight_bytes;
    EXPECT_GT(third, first.traffic.weight_bytes);
    EXPECT_LE(third, 2 * first.traffic.weight_bytes);
    EXPECT_EQ(stage_case(2, ranks).plan().traffic.bytes(), first.traffic.bytes());
  }
  EXPECT_EQ(stage_case(3, 1).plan().traffic.bytes(), 0);
}

// Of LoRA the base is gathered, once per fetch; nobody sends its gradients.
TEST(RanksPlan, TrafficOfFrozenShardsIsThatOfTheirFetches) {
  for (const int ranks : {2, 4}) {
    Case c = stage_case(3, ranks);
    c.config.train.method = Method::kLora;
    const AdapterSpec lora = adapter_r16();
    const Plan plan = c.plan();
    const std::vector<Unit> units = c.layout(&lora).units(plan.placement.head_segments() > 0);
    const double rest = 1 - 1.0 / ranks;
    double fetched = 0, gathered = 0;
    const std::vector<StepSchedule> steps = steady_steps(plan.step);
    for (const Operation& op : steps.back().operations) {
      const Unit& unit = units[static_cast<size_t>(is_transfer(op) ? op.array : op.unit)];
      if (op.kind == OperationKind::kFetch && op.pool == Pool::kWeights)
        fetched += rest * static_cast<double>(unit.frozen_bytes);
      if (op.kind == OperationKind::kGather)
        gathered +=
            rest * static_cast<double>(unit.elements * static_cast<int64_t>(dtype_size(plan.numerics.dtype)));
    }
    EXPECT_GT(fetched, 0);
    EXPECT_NEAR(plan.traffic.weight_bytes / (fetched + gathered), 1, 1e-9) << ranks;
  }
}

TEST(RanksPlan, ASlowLinkBindsAndItsRateCounts) {
  Case c = stage_case(1, 16);
  c.machine = gpu_machine("H100");
  c.device = DeviceType::kCuda;
  c.world.nodes = 2;
  c.machine.network_bandwidth = 1e9;
  const Plan slow = c.draft();
  EXPECT_EQ(slow.binding, "between machines");
  c.machine.network_bandwidth = 2e9;
  const Plan faster = c.draft();
  EXPECT_NEAR(slow.traffic.between_seconds / faster.traffic.between_seconds, 2, 1e-9);
  EXPECT_LT(faster.step_seconds, slow.step_seconds);
  // Weights go to 15 others, once to the other machine; of gradients the ranks of a machine keep 1/8 each,
  // and send one sum of it on.
  const double weights = 2 * 15.0 / 16, inside = 4 * 7.0 / 8, sums = 4 / 16.0;
  EXPECT_NEAR(slow.traffic.between_share, (weights / 15 + sums) / (weights + inside + sums), 1e-3);
  // Of ranks that are on both machines in turn each sends to each.
  c.world.by_machine = false;
  const RankTraffic mixed = c.draft().traffic;
  EXPECT_NEAR(mixed.between_share, 8 / 15.0, 1e-3);
  EXPECT_NEAR(mixed.between_seconds / (8 * mixed.bytes() * mixed.between_share / 2e9), 1, 0.01);
}

// Of two machines of eight GPUs, with shards inside each: a rank has twice the state, weights stay where they
// are, and of gradients each machine sends its sum's parts and gets them back.
TEST(RanksPlan, ShardsOfMachinesTakeMemoryAndSendNoWeightsBetweenThem) {
  for (const int64_t stage : {1, 2, 3}) {
    Case c = stage_case(stage, 16);
    c.machine = gpu_machine("H100");
    c.device = DeviceType::kCuda;
    c.world.nodes = 2;
    const Plan all = c.draft();
    c.config.zero.group = ZeroGroup::kMachine;
    const Plan machine = c.draft();
    const auto elements = static_cast<double>(c.layout(nullptr).flat_elements);
    for (const char* name : {"master", "first moment", "second moment"})
      EXPECT_NEAR(
          static_cast<double>(class_bytes(machine, name)) / static_cast<double>(class_bytes(all, name)), 2,
          0.01)
          << name;
    EXPECT_EQ(machine.numerics.machine_ranks, all.numerics.machine_ranks);
    // 1/16 of the sums in fp32 leaves each rank, and as much as gradients come back, here in fp32, too.
    const double votes = machine.traffic.vote_bytes * machine.traffic.between_share;
    EXPECT_NEAR(machine.traffic.between_share * machine.traffic.bytes(), 2 * 4 * elements / 16, votes + 1e4);
    EXPECT_NEAR(machine.traffic.gradient_bytes, elements * (4 * 7.0 / 8 + 2 * 4 / 16.0), 1);
    const double weights = 2 * elements;
    if (stage < 3) {
      EXPECT_NEAR(machine.traffic.weight_bytes, weights * 7 / 8, 1);
    }
    EXPECT_LT(machine.traffic.weight_bytes, all.traffic.weight_bytes);
  }
}

// The plan says which is faster, and never where nothing would differ.
TEST(RanksPlan, ShardsOfMachinesAreAdvisedWhereTheNetworkIsSlow) {
  const auto said = [](const Plan& plan) {
    for (const Choice& choice : plan.choices) {
      if (choice.key == "zero.group") return choice.value + ": " + choice.reason;
    }
    return std::string();
  };
  Case c = stage_case(3, 16);
  c.machine = gpu_machine("H100");
  c.device = DeviceType::kCuda;
  c.world.nodes = 2;
  c.machine.network_bandwidth = 1e9;
  c.config.train.method = Method::kLora;
  const Plan all = c.plan();
  EXPECT_NE(said(all).find("all: a step with \"machine\" is estimated at"), std::string::npos) << said(all);
  c.config.zero.group = ZeroGroup::kMachine;
  EXPECT_LT(c.plan().step_seconds, all.step_seconds);
  EXPECT_EQ(said(c.plan()), "");
  c.world.nodes = 16;
  EXPECT_NE(said(c.plan()).find("one rank on each machine"), std::string::npos) << said(c.plan());
  c.world.nodes = 1;
  EXPECT_NE(said(c.plan()).find("one machine has all ranks"), std::string::npos) << said(c.plan());
  c.config.zero.group = ZeroGroup::kAll;
  EXPECT_EQ(said(c.plan()), "");
  c.world.nodes = 2;
  c.config.zero.stage = 0;
  EXPECT_EQ(said(c.plan()), "");
  // Gradients in fp32 come back across the network in place of updated weights in bf16.
  c.config.zero.stage = 1;
  c.config.train.method = Method::kFull;
  EXPECT_EQ(said(c.plan()), "");
}

TEST(RanksPlan, ShardsOfMachinesNeedRanksThatAreNumberedByMachine) {
  Case c = stage_case(1, 4);
  c.world.nodes = 2;
  c.world.by_machine = false;
  c.plan();
  c.config.zero.group = ZeroGroup::kMachine;
  try {
    c.plan();
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    EXPECT_NE(error.text().next.find("--map-by slot"), std::string::npos) << error.text().next;
  }
}

// Nothing that is built is said to be missing.
TEST(RanksPlan, ScalingSaysWhatItLeavesOut) {
  Case c = stage_case(3, 16);
  c.world.nodes = 2;
  EXPECT_EQ(scaling_notes(c.plan()),
            std::vector<std::string>{"ranks on the CPU compute or exchange, never both at once"});
  c.machine = gpu_machine("H100");
  c.device = DeviceType::kCuda;
  EXPECT_EQ(scaling_notes(c.draft()),
            std::vector<std::string>{"no run of several GPUs has been measured yet: an estimate"});
}

TEST(RanksPlan, ScalingFindsTheFewestThatFit) {
  Case c = stage_case(3, 64, llama_8b());
  stay_near(c.config);
  c.device = DeviceType::kCuda;
  c.config.train.micro_batch = 1;
  Machine node = gpu_machine("H100");
  node.host_memory = int64_t{2048} * kGiB;
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {}, {}, nullptr};
  const Scaling scaling = estimate_scaling(inputs, node, {64, 8});
  ASSERT_GT(scaling.fewest, 1);
  ASSERT_LE(scaling.fewest, 8);
  const auto fits = [&](int ranks) {
    return draft_plan(inputs, share_of_machine(node, ranks), {ranks}).fits;
  };
  EXPECT_TRUE(fits(scaling.fewest));
  EXPECT_FALSE(fits(scaling.fewest - 1));
  double before = 0;
  for (const ScalingRow& row : scaling.rows) {
    EXPECT_EQ(row.fits, row.world.ranks >= scaling.fewest) << row.world.ranks;
    // Behind one machine's links its network may hold them up.
    if (row.world.nodes == 1) {
      EXPECT_GT(row.tokens_per_second, before);
    }
    before = row.tokens_per_second;
    if (row.world.ranks == scaling.fewest) {
      EXPECT_GT(row.efficiency, 0.5);
    }
    EXPECT_EQ(row.world.nodes, (row.world.ranks + 7) / 8);
  }
  EXPECT_EQ(scaling.rows.back().world.ranks, 64);
  // A smaller batch keeps fewer busy.
  c.config.train.global_batch = 4;
  EXPECT_EQ(estimate_scaling(inputs, node, {64, 8}).rows.back().world.ranks, 4);
}

struct Judged {
  Plan plan;
  Simulation simulation;
};

Judged judge(const Case& c, const Stragglers& stragglers = {}) {
  const AdapterSpec lora = adapter_r16();
  const AdapterSpec* adapter = c.config.train.method == Method::kLora ? &lora : nullptr;
  const ModelLayout layout = c.layout(adapter);
  const PlanInputs inputs{c.config, c.spec, adapter, layout, c.device, {}, {}, nullptr};
  Judged out{draft_plan(inputs, c.machine, c.world), {}};
  out.simulation = simulate_step(inputs, c.machine, out.plan, stragglers);
  return out;
}

// Stage 3 of 64 GPUs, with nothing off them.
Case case_of_gpus() {
  Case c = stage_case(3, 64, llama_8b());
  stay_near(c.config);
  c.device = DeviceType::kCuda;
  c.config.train.micro_batch = 1;
  return c;
}

// One of these is found by halving more than once.
TEST(RanksPlan, TheFewestAreFoundForGpusOfEachSize) {
  const Case c = case_of_gpus();
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {}, {}, nullptr};
  const std::vector<int64_t> all = {64, 33, 28, 48, 36, 34, 32, 31, 30, 29};
  for (const int64_t memory : std::span(all).first(test::counts<size_t>(3, all.size()))) {
    Machine node = gpu_machine("H100");
    node.host_memory = int64_t{2048} * kGiB;
    node.gpus.front().memory_bytes = memory * kGiB;
    int fewest = 0;
    for (int ranks = 64; ranks > 0; ranks -= ranks > 8 ? 8 : 1) {
      const World world{ranks, (ranks + 7) / 8};
      if (draft_plan(inputs, share_of_machine(node, std::min(ranks, 8)), world).fits) fewest = ranks;
    }
    EXPECT_EQ(estimate_scaling(inputs, node, {64, 8}).fewest, fewest) << memory << " GiB";
  }
}

TEST(RanksPlan, TheFewestAreFoundWhereMemoryIsJustEnough) {
  const Case c = case_of_gpus();
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {}, {}, nullptr};
  const auto node = [](int64_t sixteenths) {
    Machine out = gpu_machine("H100");
    out.host_memory = int64_t{2048} * kGiB;
    out.gpus.front().memory_bytes = sixteenths * kGiB / 16;
    return out;
  };
  // Numbers between two that doubling looks at, on both sides of their middle.
  const std::vector<int> all = {5, 24, 6, 7, 48, 56};
  for (const int enough : std::span(all).first(test::counts<size_t>(2, all.size()))) {
    const World world{enough, (enough + 7) / 8};
    int64_t low = 1, high = 256 * 16;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const Machine share = share_of_machine(node(middle), std::min(enough, 8));
      draft_plan(inputs, share, world).fits ? high = middle : low = middle + 1;
    }
    EXPECT_EQ(estimate_scaling(inputs, node(high), {64, 8}).fewest, enough) << high << "/16 GiB";
  }
}

TEST(RanksPlan, TheEstimateIsTheSimulations) {
  for (const int ranks : {1, 2, 6, 32}) {
    for (const int64_t stage : {0, 1, 2, 3}) {
      for (int which = 0; which < 5; ++which) {
        Case c = stage_case(stage, ranks, smollm2_135m());
        if (which == 1) c.config.train.method = Method::kLora;
        if (which == 2) c.config.offload.optimizer = OffloadTier::kNvme;
        if (which == 3) c.config.offload.weights = c.config.offload.gradients = OffloadTier::kNvme;
        if (which >= 2)
          c.config.offload.paths = {"/swap"}, c.machine.disks = {{"/swap", 1'000 * kGiB, 2e8, 1e8}};
        if (which == 4) {
          c.config.offload.optimizer = OffloadTier::kHost;
          c.machine = gpu_machine("H100");
          c.device = DeviceType::kCuda;
        }
        if (ranks > 6) c.world.nodes = 4;
        const Judged judged = judge(c);
        const double estimated = judged.plan.step_seconds;
        EXPECT_NEAR(estimated / judged.simulation.seconds, 1, 0.02)
            << ranks << " ranks, stage " << stage << ", " << which;
        EXPECT_GE(estimated, judged.simulation.bound * 0.999)
            << ranks << " ranks, stage " << stage << ", " << which;
      }
    }
  }
}

TEST(RanksPlan, TheForecastOfShardsOfMachinesIsTheSimulations) {
  for (const int64_t stage : {1, 2, 3}) {
    for (int which = 0; which < 4; ++which) {
      Case c = stage_case(stage, 32, smollm2_135m());
      c.world.nodes = 4;
      c.config.zero.group = ZeroGroup::kMachine;
      if (which == 1) c.config.train.method = Method::kLora;
      if (which == 2) {
        c.config.offload.weights = c.config.offload.gradients = OffloadTier::kNvme;
        c.config.offload.paths = {"/swap"}, c.machine.disks = {{"/swap", 1'000 * kGiB, 2e8, 1e8}};
      }
      if (which == 3) {
        c.machine = gpu_machine("H100");
        c.device = DeviceType::kCuda;
      }
      const Judged judged = judge(c);
      const double estimated = judged.plan.step_seconds;
      EXPECT_NEAR(estimated / judged.simulation.seconds, 1, 0.02) << "stage " << stage << ", " << which;
      EXPECT_GE(estimated, judged.simulation.bound * 0.999) << "stage " << stage << ", " << which;
    }
  }
}

// Slots hide what a disk falls behind by for some steps, and no longer.
TEST(RanksPlan, AStepIsNoShorterThanItsDisksNeed) {
  for (const int64_t stage : {1, 3}) {
    Case c = stage_case(stage, 8, llama_8b());
    c.machine = gpu_machine("H100");
    c.device = DeviceType::kCuda;
    c.config.offload.optimizer = OffloadTier::kNvme;
    c.config.offload.paths = {"/swap"}, c.machine.disks = {{"/swap", 1'000 * kGiB, 3e9, 2.5e9}};
    const Judged judged = judge(c);
    ASSERT_EQ(judged.plan.binding.substr(0, 4), "disk");
    EXPECT_GE(judged.plan.step_seconds, judged.simulation.bound * 0.999) << stage;
    EXPECT_GE(judged.simulation.seconds, judged.simulation.bound * 0.999) << stage;
  }
}

// A machine's disks are its own: four machines move four times what one does in the same time.
TEST(RanksPlan, MachinesDoNotShareTheirDisks) {
  Case c = stage_case(1, 8, smollm2_135m());
  c.config.offload.optimizer = OffloadTier::kNvme;
  c.config.offload.paths = {"/swap"}, c.machine.disks = {{"/swap", 1'000 * kGiB, 1e6, 1e6}};
  c.world.nodes = 4;
  const Judged judged = judge(c);
  ASSERT_EQ(judged.plan.binding.substr(0, 4), "disk");
  EXPECT_NEAR(judged.plan.step_seconds / judged.simulation.seconds, 1, 0.02);
}

TEST(RanksPlan, StragglersHoldAllUp) {
  Case c = stage_case(3, 64);
  c.world.nodes = 8;
  const double even = judge(c).simulation.seconds;
  const double one_slow = judge(c, {.seed = 3, .share = 0.1, .slowdown = 1.5}).simulation.seconds;
  const double all_slow = judge(c, {.seed = 3, .share = 1, .slowdown = 1.5}).simulation.seconds;
  EXPECT_GT(one_slow, even * 1.05);
  EXPECT_LE(one_slow, all_slow * 1.0001);
  EXPECT_LE(all_slow, even * 1.5);
  EXPECT_EQ(one_slow, judge(c, {.seed = 3, .share = 0.1, .slowdown = 1.5}).simulation.seconds);
}

TEST(RanksPlan, ThousandsOfRanksAreSimulated) {
  const int nodes = test::counts(128, 512);
  Case c = stage_case(3, 8 * nodes, llama_8b());
  c.world.nodes = nodes;
  c.machine = gpu_machine("H100");
  c.device = DeviceType::kCuda;
  const Judged judged = judge(c, {.seed = 1, .share = 0.01, .slowdown = 1.3});
  EXPECT_GE(judged.simulation.seconds, judged.plan.step_seconds * 0.98);
  EXPECT_LE(judged.simulation.seconds, judged.plan.step_seconds * 1.3);
  EXPECT_NEAR(judge(c).simulation.seconds / judged.plan.step_seconds, 1, 0.02);
  // Where links bind, who computes slowly is hidden under them.
  c.machine.network_bandwidth = 5e9;
  const Judged slow_links = judge(c, {.seed = 1, .share = 0.01, .slowdown = 1.3});
  EXPECT_NEAR(slow_links.simulation.seconds / slow_links.plan.step_seconds, 1, 0.02);
}

}  // namespace
}  // namespace lm
