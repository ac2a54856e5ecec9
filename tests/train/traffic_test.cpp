// What ranks send to one another in a step, counted where it leaves, against what the plan says of it.
#include "plan/traffic.h"

#include <gtest/gtest.h>

#include <thread>

#include "comm/shared_group.h"
#include "offloaded_run.h"
#include "plan/cost_model.h"
#include "schedule/step_lists.h"
#include "tests/support/oracles/collective_bytes.h"

namespace lm {
namespace {

using namespace offloaded_run;

// Of a rank in the last of some steps.
struct Sent {
  int64_t counted = 0, listed = 0;
  int64_t between = 0;  // counted, to other machines
  double planned = 0, planned_between = 0;
};

Sent last_step(const Variant& run, Group& group) {
  Training training(run, {}, {}, &group);
  constexpr int64_t kSteps = 4;
  for (int64_t s = 1; s < kSteps; ++s) training.step(s);
  const int64_t before = group.sent_bytes(), before_between = group.sent_between_machines();
  training.step(kSteps);
  Sent out{.counted = group.sent_bytes() - before, .between = group.sent_between_machines() - before_between};

  const Plan& plan = training.plan();
  const Traffic traffic(training.layout(), plan.numerics, plan.placement, plan.world);
  const StepSchedule step = steady_steps(plan.step).back();
  for (const Operation& op : step.operations) {
    for (const Collective& call : traffic.of(op)) out.listed += sent_by(call, group.rank(), group.ranks());
  }
  // Where state is off the device, a variant's slots replace those of which the plan has estimated the
  // traffic.
  const bool as_foretold = !run.weights && !run.gradients;
  const RankTraffic sum =
      as_foretold ? plan.traffic : traffic_of(traffic, step, plan.world, rank_links({}, device()));
  out.planned = sum.bytes();
  out.planned_between = out.planned * sum.between_share;
  return out;
}

// `measure`: of a rank.
template <class Measured>
std::vector<Measured> by_all(const Variant& run, int ranks, Measured (*measure)(const Variant&, Group&)) {
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<Measured> out(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup group(region, r);
        if (run.nodes > 1) group.set_machines(ranks / run.nodes);
        out[static_cast<size_t>(r)] = measure(run, group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
        region.end();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

std::vector<Sent> sent_by_all(const Variant& run, int ranks) {
  return by_all(run, ranks, last_step);
}

// Of a rank whose shards are on disk, in the last of some steps: what it moves there, in whole chunks, and
// what the list says; and the disk space of all of its arrays.
struct OnDisk {
  int64_t read = 0, written = 0, listed_read = 0, listed_written = 0;
  int64_t space = 0, planned_space = 0;
};

OnDisk last_step_on_disk(const Variant& run, Group& group) {
  Training training(run, {}, {}, &group);
  const OffDeviceState& off_device = training.rank().off_device();
  const auto counters = [&] {
    for (const Pool pool : {Pool::kWeightShards, Pool::kGradientShards}) {
      if (Store* const store = off_device.store(pool)) store->flush();
    }
    return off_device.counters();
  };
  constexpr int64_t kSteps = 5;
  for (int64_t s = 1; s < kSteps; ++s) training.step(s);
  const IoCounters before = counters();
  training.step(kSteps);
  const IoCounters after = counters();
  OnDisk out{.read = after.read_bytes - before.read_bytes,
             .written = after.written_bytes - before.written_bytes,
             .space = off_device.disk_bytes()};

  const PlacementPlan& placement = training.plan().placement;
  const std::vector<Unit> units = training.layout().units(training.head_segments() > 0);
  const auto bytes = [&](Pool whole, int64_t a) {
    const Unit& unit = units[static_cast<size_t>(a)];
    const int64_t all = placement.pool(whole).bytes[static_cast<size_t>(a)];
    if (whole == Pool::kWeights && placement.frozen_array(a))
      return frozen_shard_of(all, group.rank(), group.ranks()).elements;
    return shard_of(unit, placement.sharding(), group.rank()).elements * (all / unit.elements);
  };
  StepLists lists(training.plan().step);
  const int64_t micro_batches = lists.config().micro_batches;
  for (int64_t s = 1; s < kSteps; ++s) lists.step(micro_batches);
  for (const Operation& op : lists.step(micro_batches).operations) {
    if (!is_transfer(op) || !holds_shards(op.pool)) continue;
    const Pool whole = op.pool == Pool::kWeightShards ? Pool::kWeights : Pool::kGradients;
    const int64_t moved = round_up(bytes(whole, op.array), kSlotAlignment);
    if (op.kind == OperationKind::kFetch) out.listed_read += moved;
    if (op.kind == OperationKind::kWriteBack) out.listed_written += moved;
  }
  for (const PoolPlan& pool : placement.pools) out.planned_space += pool.off_device_bytes(Medium::kDisk);
  out.planned_space += placement.more_than_first(TierId::kNvme);
  return out;
}

// Byte for byte on each rank; and the plan's mean of all of them, which has the vote of whether to stop, too.
TEST(Traffic, IsThePlansForEveryStage) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t stage : {0, 1, 2, 3}) {
      for (int which = 0; which < 8; ++which) {
        Variant run;
        run.stage = stage;
        run.lora = which % 2 == 1;
        run.recompute = which >= 2;
        run.micro_batches = ranks * (which >= 4 ? 2 : 1);
        run.group = run.recompute && stage >= 2 && !run.lora ? 2 : 1;  // as planned
        run.in_backward = which >= 6;  // 7: the gradients of LoRA twice, for their norm
        run.clip = which == 6 ? Clip::kBlock : Clip::kGlobal;
        if (which == 0) run.tied = false, run.vocab = 17000;  // a head in segments where it is sharded
        double counted = 0;
        const std::vector<Sent> all = sent_by_all(run, ranks);
        for (const Sent& sent : all) {
          EXPECT_EQ(sent.counted, sent.listed) << ranks << " ranks, stage " << stage << " " << run.text();
          EXPECT_GT(sent.counted, 0);
          counted += static_cast<double>(sent.counted);
        }
        EXPECT_NEAR(all.front().planned * ranks / counted, 1, 0.01)
            << ranks << " ranks, stage " << stage << " " << run.text();
      }
    }
  }
}

// Sums cross between machines once for each of these, in fp32, and so does what is shared.
TEST(Traffic, IsThePlansForSeveralMachines) {
  for (const int nodes : {2, 3, 6}) {
    for (const DType gradients : {DType::kF32, DType::kBF16}) {
      for (const int64_t stage : {0, 1, 3}) {
        Variant run;
        run.stage = stage, run.nodes = nodes;
        run.gradient_dtype = gradients;
        run.micro_batches = 6;
        run.steps = 4;
        double counted = 0, between = 0;
        const std::vector<Sent> all = sent_by_all(run, 6);
        for (const Sent& sent : all) {
          EXPECT_EQ(sent.counted, sent.listed) << nodes << " machines, stage " << stage;
          counted += static_cast<double>(sent.counted);
          between += static_cast<double>(sent.between);
        }
        EXPECT_NEAR(all.front().planned * 6 / counted, 1, 0.01) << nodes << " machines, stage " << stage;
        EXPECT_NEAR(all.front().planned_between * 6 / between, 1, 0.01)
            << nodes << " machines, stage " << stage;
      }
    }
  }
}

// With shards inside machines no weights cross between them, and of gradients sums and their copies.
TEST(Traffic, OfMachinesShardsIsThePlans) {
  for (const int nodes : {2, 3, 6}) {
    for (const bool lora : {false, true}) {
      for (const int64_t stage : {1, 2, 3}) {
        Variant run;
        run.stage = stage, run.nodes = nodes, run.lora = lora;
        run.among = ZeroGroup::kMachine;
        run.gradient_dtype = stage == 2 ? DType::kBF16 : DType::kF32;
        run.weights = lora && stage == 3;  // the base in shards
        run.micro_batches = 6;
        run.steps = 4;
        const std::string text = std::to_string(nodes) + " machines " + run.text();
        double counted = 0, between = 0;
        const std::vector<Sent> all = sent_by_all(run, 6);
        for (const Sent& sent : all) {
          EXPECT_EQ(sent.counted, sent.listed) << text;
          counted += static_cast<double>(sent.counted);
          between += static_cast<double>(sent.between);
        }
        EXPECT_NEAR(all.front().planned * 6 / counted, 1, 0.01) << text;
        EXPECT_NEAR(all.front().planned_between * 6 / between, 1, 0.01) << text;
        run.among = ZeroGroup::kAll;
        double of_all = 0;
        for (const Sent& sent : sent_by_all(run, 6)) of_all += static_cast<double>(sent.between);
        // The base crosses twice or more where it is in shards among all.
        if (run.weights && nodes < 6) {
          EXPECT_LT(2 * between, of_all) << text;
        }
      }
    }
  }
}

// Byte for byte, on every rank; and each has its share of the space that a rank of stage 1 has.
TEST(Traffic, ShardsMoveThePlannedBytesToAndFromDisk) {
  int64_t moved = 0;
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t stage : {2, 3}) {
      for (const bool lora : {false, true}) {
        if (lora && stage == 2) continue;  // nothing of it is in shards off the device
        Variant run;
        run.stage = stage, run.lora = lora;
        run.recompute = !lora;
        run.micro_batches = ranks * (lora ? 1 : 2);
        run.weights = stage == 3, run.gradients = true;
        Variant whole = run;
        whole.stage = 1;
        const int64_t all = by_all(whole, ranks, last_step_on_disk).front().planned_space;
        for (const OnDisk& rank : by_all(run, ranks, last_step_on_disk)) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks " + run.text());
          EXPECT_EQ(rank.read, rank.listed_read);
          EXPECT_EQ(rank.written, rank.listed_written);
          moved += rank.listed_read + rank.listed_written;  // of few blocks the slots may be enough
          EXPECT_LE(rank.space, rank.planned_space);
          // Of each array a granule more at most, in whole chunks.
          EXPECT_NEAR(static_cast<double>(rank.planned_space) * ranks / static_cast<double>(all), 1, 0.3);
        }
      }
    }
  }
  EXPECT_GT(moved, 0);
}

// Shards of whole matrices are unequal, and ranks send other amounts: together the plan's mean of all. None
// has more on its disk than planned; of some of the blocks another rank than the first may have most, and
// that is what is planned.
TEST(Traffic, OfWholeMatricesIsThePlans) {
  int uneven = 0;  // runs of which the first rank has less on its disk than another one
  for (const RuleId rule : {Rules::id<Adafactor>(), Rules::id<Muon>()}) {
    for (const int ranks : {2, 3, 4}) {
      for (const int64_t stage : {1, 2, 3}) {
        Variant run;
        run.rule = rule;
        run.stage = stage;
        run.micro_batches = ranks;
        SCOPED_TRACE(std::to_string(ranks) + " ranks " + run.text());
        double counted = 0;
        const std::vector<Sent> all = sent_by_all(run, ranks);
        for (const Sent& sent : all) counted += static_cast<double>(sent.counted);
        EXPECT_NEAR(all.front().planned * ranks / counted, 1, 0.01);
        if (stage == 1) continue;
        run.weights = stage == 3, run.gradients = true;
        for (const OnDisk& rank : by_all(run, ranks, last_step_on_disk)) {
          EXPECT_EQ(rank.read, rank.listed_read);
          EXPECT_EQ(rank.written, rank.listed_written);
        }
        run.optimizer = true;
        for (const bool mixed : {false, true}) {
          run.mixed = mixed;
          const std::vector<OnDisk> on_disk = by_all(run, ranks, last_step_on_disk);
          int64_t most = 0;
          for (const OnDisk& rank : on_disk) {
            EXPECT_LE(rank.space, rank.planned_space) << "mixed " << mixed;
            most = std::max(most, rank.space);
          }
          EXPECT_GE(most + 3 * (run.layers + 2) * kSlotAlignment, on_disk.front().planned_space);
          uneven += most > on_disk.front().space + kSlotAlignment ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(uneven, 0);
}

TEST(Traffic, RanksSendThePlannedBytesOfShardsInEveryTier) {
  for (const int ranks : {2, 3}) {
    for (const bool lora : {false, true}) {
      Variant run;
      run.stage = 3, run.lora = lora;
      run.micro_batches = ranks;
      run.weights = run.gradients = true;
      double counted = 0;
      const std::vector<Sent> all = sent_by_all(run, ranks);
      for (const Sent& sent : all) {
        EXPECT_EQ(sent.counted, sent.listed) << ranks << " ranks " << run.text();
        counted += static_cast<double>(sent.counted);
      }
      EXPECT_NEAR(all.front().planned * ranks / counted, 1, 0.01) << ranks << " ranks " << run.text();
      Variant here = run;
      here.weights = here.gradients = false;
      EXPECT_GT(counted, 0);
      double resident = 0;
      for (const Sent& sent : sent_by_all(here, ranks)) resident += static_cast<double>(sent.counted);
      // Fewer slots gather more often, at most for each pass of a micro-batch; an update never does.
      EXPECT_LE(counted, 2 * static_cast<double>(run.micro_batches) * resident);
    }
  }
}

TEST(Traffic, OfOneRankIsNothing) {
  LocalGroup group;
  const Sent sent = last_step({.stage = 3}, group);
  EXPECT_EQ(sent.counted + sent.listed, 0);
  EXPECT_EQ(sent.planned, 0);
}

}  // namespace
}  // namespace lm
