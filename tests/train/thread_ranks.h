// A run's ranks as threads of this process, and what they give together.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "comm/shared_group.h"
#include "offloaded_run.h"

namespace lm::offloaded_run {

// Of weights and gradients that a stage shards each rank has its shard off the device, and no more.
inline void expect_shards(const Variant& run, const Training& training, const Group& group) {
  const PlacementPlan& placement = training.plan().placement;
  for (const auto& [whole, asked] :
       {std::pair(Pool::kWeights, run.weights), std::pair(Pool::kGradients, run.gradients && !run.lora)}) {
    const PoolPlan &pool = placement.pool(whole), &shards = placement.pool(*shards_of(whole));
    const Store* const store = training.rank().off_device().store(*shards_of(whole));
    EXPECT_EQ(store != nullptr, asked && pool.shards > 1) << pool_name(whole) << " " << run.text();
    if (store == nullptr) continue;
    for (size_t a = 0; a < shards.bytes.size(); ++a) {
      if (shards.off_device[a] == 0) continue;
      // Of whole tensors ranks have more of one array and less of another.
      if (placement.whole_tensors == WholeTensors::kNone) {
        EXPECT_LE(shards.bytes[a] * pool.shards, pool.bytes[a] + 2 * group.ranks() * kGranule * 4);
      }
      EXPECT_TRUE(store->holds(static_cast<int64_t>(a)));
    }
  }
}

// Calls body(group) on a thread for each rank of the region; what each has thrown, "" where nothing.
template <class Body>
std::vector<std::string> on_threads(SharedRegion& region, int ranks, const Body& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup group(region, r);
        body(group);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(r)] = error.what();
        region.end();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// What all ranks give together: the numbers, which must agree, and every byte of the state.
inline Outcome run_ranks(const Variant& run, int ranks, bool read_between = false) {
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  const std::vector<std::string> errors = on_threads(region, ranks, [&](SharedGroup& group) {
    Training training(run, {}, {}, &group);
    const OffDeviceState& off_device = training.rank().off_device();
    if (ranks > 1) expect_shards(run, training, group);
    EXPECT_EQ(training.rank().memory_of_others() > 0, run.one_copy && device() == DeviceType::kCpu);
    const bool one_pass = run.recompute || run.micro_batches <= ranks;
    const bool shards = ranks > 1;
    if (!run.weights) {
      EXPECT_EQ(off_device.store(Pool::kWeights) != nullptr, shards && run.stage >= 3);
    }
    if (!run.gradients) {
      EXPECT_EQ(off_device.store(Pool::kGradients) != nullptr,
                shards && run.stage >= 2 && !run.lora && one_pass && !run.in_backward);
    }
    outcomes[static_cast<size_t>(group.rank())] = training.run(read_between);
  });
  Outcome all = outcomes.front();
  for (size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(errors[r], "") << "rank " << r << " of " << ranks << " " << run.text();
    EXPECT_EQ(outcomes[r].losses, all.losses) << run.text();
    EXPECT_EQ(outcomes[r].norms, all.norms) << run.text();
    EXPECT_EQ(outcomes[r].evaluated, all.evaluated) << run.text();
    for (const auto& [name, bytes] : outcomes[r].state) {
      std::vector<std::byte>& known = all.state[name];
      if (known.size() < bytes.size()) known.resize(bytes.size());
      for (size_t i = 0; i < bytes.size(); ++i) known[i] |= r == 0 ? std::byte{0} : bytes[i];
    }
  }
  return all;
}

inline void expect_same(const Variant& run, int ranks, const Outcome& got, const Outcome& want) {
  EXPECT_EQ(got.losses, want.losses) << ranks << " ranks " << run.text();
  EXPECT_EQ(got.norms, want.norms) << ranks << " ranks " << run.text();
  EXPECT_EQ(got.evaluated, want.evaluated) << ranks << " ranks " << run.text();
  ASSERT_EQ(got.state.size(), want.state.size()) << run.text();
  for (const auto& [name, bytes] : want.state)
    EXPECT_TRUE(got.state.at(name) == bytes) << name << " differs: " << ranks << " ranks " << run.text();
}

}  // namespace lm::offloaded_run
