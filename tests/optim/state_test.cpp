// Weights and optimizer state on their way into a device and out of it outside of a step. Built for the CPU
// and for a GPU, where it skips without one. Nothing here makes a step.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "base/philox.h"
#include "base/staging.h"
#include "tests/support/llama_spec.h"
#include "tests/support/move_state.h"
#include "tests/support/update_staging.h"
#include "train/live_state.h"
#include "weights/initialise.h"
#include "weights/load_store.h"

namespace lm {
namespace {

DeviceType device() {
  return cuda_built() ? DeviceType::kCuda : DeviceType::kCpu;
}

class State : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_built() && cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

// Every byte by name, in order.
struct Contents : StateSink {
  std::map<std::string, std::vector<std::byte>> bytes;
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> b) override {
    std::vector<std::byte>& known = bytes[entry.name];
    EXPECT_EQ(entry.first * static_cast<int64_t>(dtype_size(entry.dtype)) + offset, std::ssize(known));
    known.insert(known.end(), b.begin(), b.end());
  }
};

ModelSpec small_spec() {
  ModelSpec spec = llama_spec({.layers = 2});
  spec.max_positions = 128, spec.tied = true;
  return spec;
}

// The weights that initialise_weights draws, by name.
std::map<std::string, std::vector<std::byte>> drawn(const ModelLayout& layout, DType dtype) {
  std::map<std::string, std::vector<std::byte>> out;
  uint32_t number = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      auto& bytes = out["weight." + place.parameter.name];
      bytes.resize(static_cast<size_t>(place.parameter.elements()) * dtype_size(dtype));
      initialise({place.parameter, 5, ++number, dtype}, bytes.data(), 0, place.parameter.rows);
    }
  }
  return out;
}

// The tensors that lie in the blocks' flat arrays, by name.
std::map<std::string, std::vector<std::byte>> tensors_of(const ModelLayout& layout, const Contents& contents,
                                                         DType dtype) {
  std::map<std::string, std::vector<std::byte>> out;
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      const auto begin =
          contents.bytes.at("block" + std::to_string(b) + ".weight").begin() + place.offset * size;
      out["weight." + place.parameter.name].assign(begin, begin + place.parameter.elements() * size);
    }
  }
  return out;
}

std::vector<float> floats(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> out(bytes.size() / dtype_size(dtype), 0);
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t size = dtype_size(dtype);
    std::memcpy(reinterpret_cast<std::byte*>(&out[i]) + 4 - size, bytes.data() + i * size, size);
  }
  return out;
}

TEST_F(State, MoreThanTheBufferHoldsGoesToTheDeviceAndComesBack) {
  const Stream stream(device());
  std::vector<int32_t> numbers(100'000), back(numbers.size());
  std::iota(numbers.begin(), numbers.end(), 7);
  const auto bytes = std::ssize(numbers) * 4;
  const Memory memory(device(), bytes);
  {
    Staging staging(stream.view(), 16 * kKiB);
    if (!staging.used()) GTEST_SKIP() << "nothing is staged on the CPU";
    const auto* const from = reinterpret_cast<const std::byte*>(numbers.data());
    for (int64_t at = 0; at < bytes; at += staging.piece_bytes()) {
      std::byte* const half = staging.next();
      const int64_t n = std::min(staging.piece_bytes(), bytes - at);
      std::memcpy(half, from + at, static_cast<size_t>(n));
      staging.send(memory.data() + at, half, n / 2);
      staging.send(memory.data() + at + n / 2, half + n / 2, n - n / 2);
    }
    staging.read_into(back.data(), memory.data(), bytes);
    EXPECT_TRUE(back == numbers);
    std::byte* const half = staging.next();
    std::memset(half, 0, 4);
    staging.send(memory.data(), half, 4);
    staging.finish();
    std::memset(half, 1, 4);  // nobody reads it any more
    staging.read_into(back.data(), memory.data(), bytes);
  }
  EXPECT_EQ(back[0], 0);
  EXPECT_EQ(back[1], numbers[1]);
}

TEST_F(State, FreshWeightsAreTheSameOnEveryDeviceAndForEveryNumberOfThreads) {
  const ModelSpec spec = small_spec();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const ModelLayout layout = make_layout(spec, nullptr, dtype);
    const auto want = drawn(layout, dtype);
    for (const int threads : {1, 3}) {
      const Stream stream(device(), threads);
      WeightStore store(layout, dtype, device());
      initialise_weights({spec, layout, dtype, stream.view(), threads}, 5, store);
      Contents contents;
      LiveState state(store, nullptr, stream.view());
      move_state(list_state(layout, {{.dtype = dtype}}, false, false), state, contents);
      EXPECT_TRUE(tensors_of(layout, contents, dtype) == want)
          << dtype_name(dtype) << ", " << threads << " threads";
    }
  }
}

// The values that one element after another has, however they are drawn.
TEST(Initialise, DrawsTheSameBitsForEveryRangeAndNumberOfThreads) {
  Parameter p;
  p.rows = 301, p.columns = 257;
  const uint64_t key = philox_key(9, Purpose::kInit, 0, 3);
  const auto unit = [](uint32_t word) { return (static_cast<double>(word) + 1.0) / 4294967296.0; };
  std::vector<float> normal(static_cast<size_t>(p.elements())), uniform(normal.size());
  for (size_t i = 0; i < normal.size(); ++i) {
    const double u = unit(philox_at(key, i, 0, 0)), angle = 2 * M_PI * unit(philox_at(key, i, 1, 0));
    normal[i] = static_cast<float>(0.02 * std::sqrt(-2 * std::log(u)) * std::cos(angle));
    uniform[i] = static_cast<float>((2 * u - 1) * (1.0 / std::sqrt(257.0)));
  }
  for (const TrainableRole role : {TrainableRole::kWeight, TrainableRole::kLoraA}) {
    p.role = role;
    const std::vector<float>& want = role == TrainableRole::kLoraA ? uniform : normal;
    for (const int threads : {1, 2, 5}) {
      for (const int64_t first : {0, 1, 100}) {
        std::vector<float> got(static_cast<size_t>((p.rows - first) * p.columns));
        initialise({p, 9, 3, DType::kF32}, reinterpret_cast<std::byte*>(got.data()), first, p.rows - first,
                   threads);
        EXPECT_EQ(std::memcmp(got.data(), want.data() + first * p.columns, got.size() * 4), 0)
            << threads << " threads from row " << first;
      }
    }
  }
}

// Masters begin as the weights, wherever they are updated, and say so at once.
TEST_F(State, MastersAreReadAsTheyAre) {
  const ModelSpec spec = small_spec();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const auto weights = drawn(layout, DType::kBF16);
  for (const Master master : {Master::kF32, Master::kSplit}) {
    for (const bool host : {false, true}) {
      const Stream stream(device(), 2);
      Staging staging(stream.view());
      WeightStore store(layout, DType::kBF16, device());
      initialise_weights({spec, layout, DType::kBF16, stream.view(), 1}, 5, store);
      OptimizerConfig config;
      config.master = master;
      TileLayout tiles;
      for (const BlockLayout& block : layout.blocks) {
        tiles.first_tile.push_back(std::ssize(tiles.first_granule));
        const int64_t granules = block.flat_elements / kGranule;
        for (int64_t g = 0; g < granules; g += 3) {
          tiles.first_granule.push_back(g);
          tiles.granules.push_back(std::min<int64_t>(3, granules - g));
        }
      }
      tiles.first_tile.push_back(std::ssize(tiles.first_granule));
      tiles.off_device.assign(tiles.first_granule.size(), host ? 1 : 0);
      std::vector<std::byte> slots(
          static_cast<size_t>(update_staging_bytes(3 * kGranule, DType::kF32, DType::kBF16)));
      ShardedOptimizer optimizer({.layout = layout,
                                  .config = config,
                                  .kernels = kernels(device()),
                                  .tiles = tiles,
                                  .site = {.host = host, .threads = 2, .staging = slots}},
                                 stream.view());
      for (const Unit& unit : store.units()) {
        optimizer.start(unit, store.open(unit.block, false).trainable(), staging);
      }
      for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
        for (const TensorPlace& place : layout.blocks[static_cast<size_t>(b)].tensors) {
          std::vector<float> out(static_cast<size_t>(place.parameter.elements()));
          optimizer.read_master(b, place, store.open(b, false).trainable(), out.data(), staging);
          EXPECT_TRUE(out == floats(weights.at("weight." + place.parameter.name), DType::kBF16))
              << place.parameter.name << (host ? " on the host" : "");
        }
      }
      Contents contents;
      LiveState state(store, &optimizer, stream.view());
      NumericsPlan numerics;
      numerics.master = master;
      move_state(list_state(layout, numerics, false, true), state, contents);
      for (size_t b = 0; b < layout.blocks.size(); ++b) {
        const auto elements = layout.blocks[b].flat_elements;
        const std::string name = "block" + std::to_string(b) + ".";
        EXPECT_EQ(std::ssize(contents.bytes[name + "m"]), elements * 4);
        EXPECT_TRUE(contents.bytes[name + "v"] ==
                    std::vector<std::byte>(static_cast<size_t>(elements) * 4, std::byte{0}));
        EXPECT_EQ(std::ssize(contents.bytes[name + "master"]), elements * (master == Master::kF32 ? 4 : 2));
      }
    }
  }
}

}  // namespace
}  // namespace lm
