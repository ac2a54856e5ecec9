// Two checkpoints compared: which tensor differs first, by how much, whoever saved them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <thread>

#include "checkpoint/save.h"
#include "checkpoint/state_difference.h"
#include "comm/shared_group.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kElements = 8192;

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> out(values.size() * sizeof(T));
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

struct State {
  struct Array {
    DType dtype;
    std::vector<std::byte> bytes;
  };
  std::map<std::string, Array> arrays;
  // Two tensors, whose names are not in their order.
  std::vector<SavedTensor> tensors = {{"z.weight", 0, 0, {64, 32}}, {"a.weight", 0, 4096, {64}}};
  int64_t updates = 7;
};

State some_state() {
  std::vector<float> weights(kElements), moments(kElements);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<float>(i % 64);  // exact in bf16
    moments[i] = static_cast<float>(i) * 0.5F;
  }
  State out;
  out.arrays["block0.weight"] = {DType::kF32, bytes_of(weights)};
  out.arrays["block0.m"] = {DType::kF32, bytes_of(moments)};
  out.arrays["block0.codes"] = {DType::kU8, std::vector<std::byte>(kElements / 2)};
  return out;
}

template <class T>
void set(State& state, const std::string& array, size_t element, T value) {
  std::memcpy(state.arrays.at(array).bytes.data() + element * sizeof(T), &value, sizeof value);
}

class StateDifferences : public testing::Test {
 protected:
  void TearDown() override { fs::remove_all(directory_); }

  CheckpointReader saved(const State& state, int ranks = 1) {
    const std::string directory = directory_ + "/" + std::to_string(++saves_);
    SharedRegion region = SharedRegion::create(ranks);
    std::string path;
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        SharedGroup group(region, r);
        const std::string made = save_rank(state, directory, group, r, ranks);
        if (r == 0) path = made;
      });
    }
    for (std::thread& thread : threads) thread.join();
    return CheckpointReader(path);
  }

 private:
  static std::string save_rank(const State& state, const std::string& directory, SharedGroup& group, int rank,
                               int ranks) {
    StateCatalogue catalogue;
    for (const auto& [name, array] : state.arrays) {
      const int64_t all = std::ssize(array.bytes) / static_cast<int64_t>(dtype_size(array.dtype));
      catalogue.push_back({.name = name,
                           .dtype = array.dtype,
                           .shape = {all},
                           .unit = 0,
                           .first = all / ranks * rank,
                           .elements = all / ranks});
    }
    if (rank == 0) catalogue.push_back({.name = "optimizer.t", .dtype = DType::kI64});
    Save save({.directory = directory, .step = 1, .catalogue = catalogue, .group = &group});
    for (const StateEntry& entry : catalogue) {
      if (entry.unit < 0) {
        save.write(entry, 0, std::as_bytes(std::span(&state.updates, 1)));
        continue;
      }
      const auto size = static_cast<int64_t>(dtype_size(entry.dtype));
      save.write(entry, 0,
                 std::span(state.arrays.at(entry.name).bytes)
                     .subspan(static_cast<size_t>(entry.first * size), static_cast<size_t>(entry.bytes())));
    }
    Manifest manifest;
    manifest.step = 1;
    manifest.tensors = state.tensors;
    return save.commit(std::move(manifest));
  }

  std::string directory_ = testing::TempDir() + "state_difference_" + std::to_string(getpid());
  int saves_ = 0;
};

TEST_F(StateDifferences, ThereAreNoneWhateverTheNumberOfRanks) {
  CheckpointReader one = saved(some_state()), four = saved(some_state(), 4);
  const StateDifference weights = compare_weights(one, four), state = compare_optimizer(one, four);
  EXPECT_TRUE(weights.equal() && state.equal());
  EXPECT_EQ(weights.compared, 2);
  EXPECT_EQ(state.compared, 4);  // a moment of two tensors, the codes, the updates
}

TEST_F(StateDifferences, TheFirstIsTheFirstOfTheModelNotOfTheNames) {
  State changed = some_state();
  set(changed, "block0.weight", 4096 + 1, 1 + 0.25F);
  set(changed, "block0.weight", 4096 + 2, 2 + 8.0F);
  set(changed, "block0.weight", 4096 + 100, 3.0F);  // of no tensor
  CheckpointReader one = saved(some_state()), two = saved(changed, 2);
  StateDifference found = compare_weights(one, two);
  EXPECT_EQ(found.differ, 1);
  EXPECT_EQ(found.first->name, "a.weight");
  EXPECT_EQ(found.first->differ, 2);
  EXPECT_EQ(found.first->largest, 8.0);
  set(changed, "block0.weight", 5, std::numeric_limits<float>::quiet_NaN());
  CheckpointReader three = saved(changed);
  found = compare_weights(one, three);
  EXPECT_EQ(found.differ, 2);
  EXPECT_EQ(found.first->name, "z.weight");
  EXPECT_TRUE(std::isinf(*found.first->largest) && std::isinf(*found.largest));
}

TEST_F(StateDifferences, TypesAreComparedAsValuesAndCodesAsBytes) {
  State half = some_state();
  std::vector<uint16_t> weights(kElements);
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto value = static_cast<float>(i % 64);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    weights[i] = static_cast<uint16_t>(bits >> 16);
  }
  half.arrays["block0.weight"] = {DType::kBF16, bytes_of(weights)};
  set(half, "block0.codes", 4000, uint8_t{3});
  half.updates = 9;
  CheckpointReader one = saved(some_state()), two = saved(half);
  EXPECT_TRUE(compare_weights(one, two).equal());
  const StateDifference state = compare_optimizer(one, two);
  EXPECT_EQ(state.differ, 2);
  EXPECT_EQ(state.first->name, "block0 codes");
  EXPECT_EQ(state.first->differ, 1);
  EXPECT_FALSE(state.first->largest);
  EXPECT_EQ(state.largest, 2.0);  // of the updates
}

TEST_F(StateDifferences, WhatOneDoesNotHaveIsCounted) {
  State other = some_state();
  other.tensors = {{"z.weight", 0, 0, {32, 32}}, {"b.weight", 0, 4096, {64}}};
  other.arrays["block0.v"] = other.arrays.extract("block0.codes").mapped();
  CheckpointReader one = saved(some_state()), two = saved(other);
  const StateDifference weights = compare_weights(one, two), state = compare_optimizer(one, two);
  EXPECT_EQ(weights.differ, 1);  // of another shape
  EXPECT_FALSE(weights.first->largest);
  EXPECT_EQ(weights.only_a, 1);
  EXPECT_EQ(weights.only_b, 1);
  EXPECT_EQ(state.only_a, 1);
  EXPECT_EQ(state.only_b, 1);
  EXPECT_FALSE(weights.equal() || state.equal());
}

}  // namespace
}  // namespace lm
