// What some ranks have saved goes on with any other number of them, at any stage: the state that all have
// together is the same byte for byte, and training goes on as it would have.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <thread>

#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "comm/shared_group.h"
#include "offloaded_run.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

namespace fs = std::filesystem;
using namespace offloaded_run;

constexpr int64_t kSavedAfter = 3, kSteps = 5;

struct Ran {
  State state;                        // of all ranks together, before the steps below
  std::vector<double> losses, norms;  // of the steps after the save
};

// Calls work(rank, group) on so many threads.
void with_ranks(int ranks, const std::function<void(int, Group&)>& work) {
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup group(region, r);
        work(r, group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << " of " << ranks << ": " << error.what();
        region.end();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Each rank has its shards, and zeros for the others'.
State joined(const std::vector<State>& parts) {
  State all;
  for (const State& part : parts) {
    for (const auto& [name, bytes] : part) {
      std::vector<std::byte>& known = all[name];
      known.resize(std::max(known.size(), bytes.size()));
      for (size_t i = 0; i < bytes.size(); ++i) known[i] |= bytes[i];
    }
  }
  return all;
}

void go_on(Training& training, int rank, Ran& out) {
  for (int64_t s = kSavedAfter + 1; s <= kSteps; ++s) {
    const StepResult result = training.step(s);
    if (rank != 0) continue;
    out.losses.push_back(result.loss);
    out.norms.push_back(result.grad_norm);
  }
}

Ran train_and_save(const Variant& run, int ranks, const std::string& directory, std::string& saved) {
  Ran out;
  std::vector<State> states(static_cast<size_t>(ranks));
  with_ranks(ranks, [&](int r, Group& group) {
    Training training(run, {}, {}, &group);
    for (int64_t s = 1; s <= kSavedAfter; ++s) training.step(s);
    const StateCatalogue catalogue = training.catalogue();
    states[static_cast<size_t>(r)] = training.state();
    LiveState live = training.live_state();
    Save save({.directory = directory, .step = kSavedAfter, .catalogue = catalogue, .group = &group});
    move_state(catalogue, live, save);
    Manifest manifest;
    manifest.step = kSavedAfter;
    const std::string path = save.commit(std::move(manifest));
    if (r == 0) saved = path;
    go_on(training, r, out);
  });
  out.state = joined(states);
  return out;
}

Ran load_and_go_on(const Variant& run, int ranks, const std::string& saved) {
  Ran out;
  std::vector<State> states(static_cast<size_t>(ranks));
  with_ranks(ranks, [&](int r, Group& group) {
    Training training(run, {}, {}, &group);
    CheckpointReader reader(saved);
    training.restore_from(reader, kSavedAfter);
    states[static_cast<size_t>(r)] = training.state();
    go_on(training, r, out);
  });
  out.state = joined(states);
  return out;
}

TEST(Reshard, AnyNumberOfRanksGoesOnFromAnyOther) {
  const fs::path directory = fs::path(testing::TempDir()) / ("reshard_" + std::to_string(getpid()));
  // Adapters are of small tensors alone, whose state is never coded.
  const struct {
    bool lora;
    RuleId rule;
  } runs[] = {{false, Rules::id<AdamW>()},
              {true, Rules::id<AdamW>()},
              {false, Rules::id<AdamW8bit>()},
              {false, Rules::id<Muon>()},
              {false, Rules::id<Adafactor>()}};
  int turn = 0;
  for (const auto& [lora, rule] : runs) {
    ++turn;
    int64_t pair = 0;
    for (const int saving : {1, 2, 3, 4}) {
      Variant run;
      run.lora = lora;
      run.rule = rule;
      run.tied = false;
      run.dtype = DType::kF32;
      run.master = Master::kF32;
      run.micro_batches = 8;
      run.recompute = true;
      run.group = 8;
      run.stage = saving - 1;
      run.weights = run.gradients = saving % 2 == 0;  // on disk, of four in shards
      std::string saved;
      const Ran want = train_and_save(run, saving, directory, saved);
      for (const int loading : {1, 2, 3, 4, 5, 8}) {
        // Each two numbers in the short tier, too, each pair with some of the rules.
        if (!test::full_counts() && (saving + loading + turn) % 3 != 0) continue;
        run.stage = pair++ % 4;
        run.optimizer = pair % 3 == 0;                // on disk
        run.weights = run.gradients = pair % 2 == 0;  // likewise
        const std::string text = std::to_string(saving) + " ranks saved, " + std::to_string(loading) +
                                 " load at stage " + std::to_string(run.stage) + (lora ? ", LoRA, " : ", ") +
                                 rule_text(rule).name;
        const Ran got = load_and_go_on(run, loading, saved);
        ASSERT_EQ(got.state.size(), want.state.size()) << text;
        for (const auto& [name, bytes] : want.state)
          EXPECT_TRUE(got.state.at(name) == bytes) << name << ": " << text;
        ASSERT_EQ(got.losses.size(), want.losses.size()) << text;
        for (size_t s = 0; s < want.losses.size(); ++s) {
          EXPECT_LE(std::abs(got.losses[s] / want.losses[s] - 1), 1e-6) << text;
          // Later gradients are of weights that were stepped: muon's matrices by products in bf16, which
          // round a momentum's last bit to another step.
          const double bound = s > 0 && rule == Rules::id<Muon>() ? 1e-4 : 1e-5;
          EXPECT_LE(std::abs(got.norms[s] / want.norms[s] - 1), bound) << text;
          if (loading == saving) {
            EXPECT_EQ(got.losses[s], want.losses[s]) << text;
          }
        }
      }
      fs::remove_all(directory);
    }
  }
}

// What machines save that each have all shards, and what is saved of shards among all, goes on as the other
// and with other numbers; on as many machines with the same bits.
TEST(Reshard, ShardsOfMachinesGoOnAsAnyOther) {
  const fs::path directory = fs::path(testing::TempDir()) / ("reshard_machines_" + std::to_string(getpid()));
  int turn = 0;
  for (const RuleId rule : {Rules::id<AdamW>(), Rules::id<AdamW8bit>(), Rules::id<Adafactor>()}) {
    for (const ZeroGroup saving : {ZeroGroup::kMachine, ZeroGroup::kAll}) {
      Variant run;
      run.rule = rule;
      run.tied = false;
      run.dtype = DType::kF32;
      run.master = Master::kF32;
      run.micro_batches = 12;
      run.recompute = true;
      run.group = 12;
      run.stage = 3, run.nodes = 2, run.among = saving;
      run.optimizer = run.weights = run.gradients = saving == ZeroGroup::kMachine;  // on disk
      std::string saved;
      const Ran want = train_and_save(run, 4, directory, saved);
      for (const auto& [ranks, nodes, among] : {std::tuple{4, 2, ZeroGroup::kAll},
                                                {4, 2, ZeroGroup::kMachine},
                                                {6, 3, ZeroGroup::kMachine},
                                                {3, 1, ZeroGroup::kAll},
                                                {6, 2, ZeroGroup::kMachine},
                                                {1, 1, ZeroGroup::kMachine}}) {
        run.nodes = nodes, run.among = among;
        run.stage = turn++ % 3 + 1;
        run.optimizer = turn % 2 == 0;
        run.weights = run.gradients = turn % 3 == 0;
        const std::string text = std::to_string(ranks) + " ranks load, " + run.text();
        const Ran got = load_and_go_on(run, ranks, saved);
        ASSERT_EQ(got.state.size(), want.state.size()) << text;
        for (const auto& [name, bytes] : want.state)
          EXPECT_TRUE(got.state.at(name) == bytes) << name << ": " << text;
        ASSERT_EQ(got.losses.size(), want.losses.size()) << text;
        for (size_t s = 0; s < want.losses.size(); ++s) {
          EXPECT_LE(std::abs(got.losses[s] / want.losses[s] - 1), 1e-6) << text;
          EXPECT_LE(std::abs(got.norms[s] / want.norms[s] - 1), 1e-5) << text;
          if (ranks == 4 && nodes == 2) {
            EXPECT_EQ(got.losses[s], want.losses[s]) << text;
            EXPECT_EQ(got.norms[s], want.norms[s]) << text;
          }
        }
      }
      fs::remove_all(directory);
    }
  }
}

// Of what a rank keeps: its shards, or the whole weights where these are not in shards.
int64_t needed_bytes(Training& training, int64_t stage, int rank, int ranks) {
  const NumericsPlan& numerics = training.plan().numerics;
  const StateTensors streams = numerics.state();
  const auto weight = static_cast<int64_t>(dtype_size(numerics.trained_dtype()));
  int64_t state = 0, needed = 0;
  for (const StateTensor& stream : streams) state += static_cast<int64_t>(dtype_size(stream.type));
  const std::vector<Unit> units = training.layout().units(training.head_segments() > 0);
  for (int64_t u = 0; u < std::ssize(units); ++u) {
    const Unit& unit = units[static_cast<size_t>(u)];
    const int64_t own = shard_of(unit, rank, ranks).elements;
    needed += weight * (training.weights_in_shards(u) ? own : unit.elements);
    needed += state * (stage == 0 ? unit.elements : own);
  }
  return needed;
}

// The vocabulary makes the arrays so long that a chunk of a checksum is little of a shard.
TEST(Reshard, RanksReadHardlyMoreThanTheyKeep) {
  const fs::path directory = fs::path(testing::TempDir()) / ("reshard_reads_" + std::to_string(getpid()));
  Variant run;
  run.vocab = 80000;
  run.tied = false;
  run.layers = 1;
  run.micro_batches = 8;
  run.recompute = true;
  run.granules = 16;  // of a tile, which is read by itself where its tier is a disk: some chunks
  run.stage = 1;
  std::string saved;
  with_ranks(2, [&](int r, Group& group) {
    Training training(run, {}, {}, &group);
    const StateCatalogue catalogue = training.catalogue();
    LiveState live = training.live_state();
    Save save({.directory = directory.string(), .step = 1, .catalogue = catalogue, .group = &group});
    move_state(catalogue, live, save);
    Manifest manifest;
    manifest.step = 1;
    const std::string path = save.commit(std::move(manifest));
    if (r == 0) saved = path;
  });
  for (const auto& [ranks, stage, on_disk] : {std::tuple{3, 0, false}, {4, 3, true}}) {
    run.stage = stage;
    run.optimizer = on_disk;
    with_ranks(ranks, [&, ranks = ranks, stage = stage, on_disk = on_disk](int r, Group& group) {
      Training training(run, {}, {}, &group);
      CheckpointReader reader(saved);
      const int64_t before = reader.read_bytes();  // headers
      training.restore_from(reader, 0);
      const auto read = static_cast<double>(reader.read_bytes() - before);
      const auto needed = static_cast<double>(needed_bytes(training, stage, r, ranks));
      EXPECT_GE(read, needed) << "rank " << r << " of " << ranks << ", stage " << stage;
      EXPECT_LE(read, 1.05 * needed) << "rank " << r << " of " << ranks << ", stage " << stage
                                     << (on_disk ? ", on disk" : "");
    });
  }
  fs::remove_all(directory);
}

}  // namespace
}  // namespace lm
