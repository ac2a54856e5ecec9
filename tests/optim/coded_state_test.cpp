// Where state is coded, each tensor is updated as if it were alone: its blocks of 256 begin with it, and a
// small tensor's state is the uncoded rule's, whatever lies beside it and however its block is cut into
// tiles.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/staging.h"
#include "optim/sharded_optimizer.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

// Small and large tensors in turns: adapters, or weights and norms.
ModelLayout mixed_layout(bool lora) {
  ModelSpec spec = llama_spec({});
  spec.tied = true;
  const AdapterSpec adapter{.r = 40,
                            .alpha = 8,
                            .rslora = false,
                            .dropout = 0,
                            .targets = {"q_proj", "k_proj", "down_proj", "up_proj"}};
  return make_layout(spec, lora ? &adapter : nullptr, DType::kF32);
}

std::vector<float> random_floats(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, 0.1F);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = normal(engine);
  return out;
}

// Zero between tensors, as weights and gradients are there.
std::vector<float> of_block(const BlockLayout& block, uint32_t seed) {
  std::vector<float> out = random_floats(block.flat_elements, seed);
  std::vector<char> used(out.size(), 0);
  for (const TensorPlace& place : block.tensors) {
    if (!place.frozen) std::fill_n(used.begin() + place.offset, place.parameter.elements(), 1);
  }
  for (size_t i = 0; i < out.size(); ++i) out[i] = used[i] != 0 ? out[i] : 0;
  return out;
}

TEST(Layout, CountsSmallTensorsWithWhatLiesBehindThem) {
  bool mixed = false;
  for (const bool lora : {false, true}) {
    const ModelLayout layout = mixed_layout(lora);
    for (const BlockLayout& block : layout.blocks) {
      // Element by element.
      std::vector<char> small(static_cast<size_t>(block.flat_elements), 0);
      for (const TensorPlace& place : block.tensors) {
        if (!place.frozen)
          std::fill(small.begin() + place.offset, small.end(), place.parameter.elements() < 4096 ? 1 : 0);
      }
      for (int64_t from = 0; from <= block.flat_elements; from += 1024) {
        for (int64_t to = from; to <= block.flat_elements; to += 1280) {
          const Elements got = block.count(from, to);
          ASSERT_EQ(got.all, to - from);
          ASSERT_EQ(got.small, std::count(small.begin() + from, small.begin() + to, 1))
              << from << " to " << to;
        }
      }
      int64_t end = 0, runs = 0;
      block.each_run(0, block.flat_elements, [&](int64_t first, int64_t elements, bool is_small) {
        ASSERT_EQ(first, end);
        for (int64_t i = first; i < first + elements; ++i)
          ASSERT_EQ(small[static_cast<size_t>(i)] != 0, is_small);
        end = first + elements;
        ++runs;
      });
      EXPECT_EQ(end, block.flat_elements);
      mixed = mixed || runs > 2;
    }
  }
  EXPECT_TRUE(mixed) << "no block has small and large tensors in turns";
}

struct Bytes {
  std::vector<std::byte> all;
  template <class T>
  std::vector<T> as() const {
    std::vector<T> out(all.size() / sizeof(T));
    std::memcpy(out.data(), all.data(), all.size());
    return out;
  }
};

// The streams of a block, whole, after steps with tiles of so many granules.
std::vector<Bytes> train(const ModelLayout& layout, size_t b, int64_t granules, std::vector<float>& weights) {
  OptimizerConfig config;
  config.name = Rules::id<AdamW8bit>();
  config.weight_decay = 0.1;
  TileLayout tiles;
  for (const BlockLayout& block : layout.blocks) {
    tiles.first_tile.push_back(std::ssize(tiles.first_granule));
    for (int64_t g = 0; g < block.flat_elements / kGranule; g += granules) {
      tiles.first_granule.push_back(g);
      tiles.granules.push_back(std::min(granules, block.flat_elements / kGranule - g));
    }
  }
  tiles.first_tile.push_back(std::ssize(tiles.first_granule));
  const StreamView stream{DeviceType::kCpu, nullptr, 1};
  ShardedOptimizer optimizer({.layout = layout,
                              .config = config,
                              .weight_dtype = DType::kF32,
                              .kernels = kernels(DeviceType::kCpu),
                              .tiles = tiles},
                             stream);
  const BlockLayout& block = layout.blocks[b];
  for (uint32_t step = 1; step <= 3; ++step) {
    const std::vector<float> gradients = of_block(block, 10 + step);
    optimizer.begin_update();
    optimizer.update(static_cast<int64_t>(b),
                     {.weights = reinterpret_cast<std::byte*>(weights.data()),
                      .gradients = reinterpret_cast<const std::byte*>(gradients.data()),
                      .lr = 0.01,
                      .step = step,
                      .elements = block.flat_elements});
  }
  Staging staging(stream);
  const StateTensors streams(config.name, MasterForm::kWeight);
  std::vector<Bytes> out(streams.size());
  for (int64_t tile = 0; tile < optimizer.tiles(static_cast<int64_t>(b)); ++tile) {
    const TileRange range = optimizer.range(static_cast<int64_t>(b), tile);
    const OpenTile open = optimizer.open(static_cast<int64_t>(b), tile);
    for (size_t s = 0; s < streams.size(); ++s) {
      open.read(s, range.first, range.end(), nullptr, staging,
                [&](int64_t, std::span<const std::byte> bytes) {
                  out[s].all.insert(out[s].all.end(), bytes.begin(), bytes.end());
                });
    }
  }
  return out;
}

TEST(CodedState, EachTensorIsUpdatedAsIfItWereAlone) {
  for (const bool lora : {false, true}) {
    const ModelLayout layout = mixed_layout(lora);
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      const BlockLayout& block = layout.blocks[b];
      for (const int64_t granules : {1, 3, 1000}) {
        std::vector<float> weights = of_block(block, 1);
        const std::vector<Bytes> got = train(layout, b, granules, weights);
        if (block.flat_elements == 0) continue;
        for (const TensorPlace& place : block.tensors) {
          if (place.frozen) continue;
          const int64_t n = place.parameter.elements(), padded = (n + 255) / 256 * 256;
          const auto part = [&](std::vector<float> all) {
            all.resize(static_cast<size_t>(block.flat_elements + 256));
            return std::vector<float>(all.begin() + place.offset, all.begin() + place.offset + padded);
          };
          const bool small = n < 4096;
          std::vector<float> alone = part(of_block(block, 1)), m(alone.size()), v(alone.size()),
                             scales(alone.size() / 128);
          std::vector<uint8_t> codes(2 * alone.size());
          for (uint32_t step = 1; step <= 3; ++step) {
            const std::vector<float> gradient = part(of_block(block, 10 + step));
            RuleUpdate update{
                .rule = AdamW8bit::at(
                    {}, {.lr = 0.01, .weight_decay = place.parameter.vector() ? 0 : 0.1, .t = step}),
                .gradient = gradient.data(),
                .weight = alone.data(),
                .state = {m.data(), v.data()},
                .elements = padded};
            if (!small) {
              update.state[0] = scales.data(), update.state[1] = scales.data() + padded / 256;
              update.codes[0] = codes.data(), update.codes[1] = codes.data() + padded;
            }
            kernels(DeviceType::kCpu).update(update, {});
          }
          SCOPED_TRACE(place.parameter.name + ", tiles of " + std::to_string(granules));
          EXPECT_TRUE(std::equal(alone.begin(), alone.begin() + n, weights.begin() + place.offset));
          const Elements before = block.count(0, place.offset);
          for (size_t s = 0; s < 2; ++s) {
            if (small) {
              const std::vector<float>& want = s == 0 ? m : v;
              const std::vector<float> values = got[3 * s + 2].as<float>();
              EXPECT_TRUE(std::equal(want.begin(), want.end(), values.begin() + before.small));
            } else {
              const auto of_state = static_cast<std::ptrdiff_t>(s) * padded;
              const std::vector<uint8_t> values = got[3 * s].as<uint8_t>();
              EXPECT_TRUE(std::equal(codes.begin() + of_state, codes.begin() + of_state + padded,
                                     values.begin() + before.large()));
              const std::vector<float> of_blocks = got[3 * s + 1].as<float>();
              EXPECT_TRUE(std::equal(scales.begin() + of_state / 256,
                                     scales.begin() + (of_state + padded) / 256,
                                     of_blocks.begin() + before.large() / 256));
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lm
