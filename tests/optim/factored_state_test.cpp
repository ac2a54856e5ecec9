// Where state is statistics of rows and columns, each tensor of the files is updated as if it were alone,
// though several lie in one tensor of ours and many in a block.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/bytes.h"
#include "base/staging.h"
#include "optim/sharded_optimizer.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

ModelLayout layout_of(bool lora) {
  ModelSpec spec = llama_spec({});
  spec.layers[0].attention().qkv_bias = true;  // a vector of several
  const AdapterSpec adapter{
      .r = 5, .alpha = 8, .rslora = false, .dropout = 0, .targets = {"q_proj", "k_proj", "down_proj"}};
  return make_layout(spec, lora ? &adapter : nullptr, DType::kF32);
}

std::vector<float> of_block(const BlockLayout& block, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, 0.1F);
  std::vector<float> out(static_cast<size_t>(block.flat_elements), 0);
  for (const TensorPlace& place : block.tensors) {
    for (int64_t i = 0; !place.frozen && i < place.parameter.elements(); ++i)
      out[static_cast<size_t>(place.offset + i)] = normal(engine);
  }
  return out;
}

TEST(Layout, CountsRowsAndColumnsWhereAMatrixBegins) {
  for (const bool lora : {false, true}) {
    for (const BlockLayout& block : layout_of(lora).blocks) {
      for (int64_t from = 0; from <= block.flat_elements; from += 1024) {
        for (int64_t to = from; to <= block.flat_elements; to += 1280) {
          Elements want;
          for (const TensorPlace& place : block.tensors) {
            if (place.frozen || place.parameter.vector()) continue;
            for (const ParameterPart& part : place.parameter.parts) {
              const int64_t first = place.offset + part.first * place.parameter.columns;
              if (first < from || first >= to) continue;
              want.rows += round_up(part.rows, 64);
              want.columns += round_up(place.parameter.columns, 64);
            }
          }
          for (const DecayRange& range : block.ranges) {
            for (int64_t i = range.first; i < range.first + range.elements; ++i)
              want.vectors += !range.decay && i >= from && i < to ? 1 : 0;
          }
          const Elements got = block.count(from, to);
          ASSERT_EQ(got.rows, want.rows);
          ASSERT_EQ(got.columns, want.columns);
          ASSERT_EQ(got.vectors, want.vectors);
        }
      }
    }
  }
}

constexpr uint32_t kSteps = 3;

struct Trained {
  std::vector<float> weights;
  std::vector<std::vector<float>> streams;
};

Trained train(const ModelLayout& layout, int64_t b) {
  const BlockLayout& block = layout.blocks[static_cast<size_t>(b)];
  OptimizerConfig config;
  config.name = Rules::id<Adafactor>();
  config.weight_decay = 0.1;
  const StreamView stream{DeviceType::kCpu, nullptr, 1};
  ShardedOptimizer optimizer(
      {.layout = layout, .config = config, .weight_dtype = DType::kF32, .kernels = kernels(DeviceType::kCpu)},
      stream);
  Trained out{of_block(block, 1), {}};
  for (uint32_t step = 1; step <= kSteps; ++step) {
    const std::vector<float> gradients = of_block(block, 10 + step);
    optimizer.begin_update();
    optimizer.update(b, {.weights = reinterpret_cast<std::byte*>(out.weights.data()),
                         .gradients = reinterpret_cast<const std::byte*>(gradients.data()),
                         .lr = 0.01,
                         .step = step,
                         .elements = block.flat_elements});
  }
  Staging staging(stream);
  const OpenTile open = optimizer.open(b, 0);
  for (size_t s = 0; s < 3; ++s) {
    std::vector<std::byte> all;
    open.read(s, 0, block.flat_elements, nullptr, staging, [&](int64_t, std::span<const std::byte> bytes) {
      all.insert(all.end(), bytes.begin(), bytes.end());
    });
    const auto* const values = reinterpret_cast<const float*>(all.data());
    out.streams.emplace_back(values, values + all.size() / 4);
  }
  return out;
}

TEST(FactoredState, EachTensorOfTheFilesIsUpdatedAsIfItWereAlone) {
  for (const bool lora : {false, true}) {
    const ModelLayout layout = layout_of(lora);
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      const BlockLayout& block = layout.blocks[b];
      if (block.flat_elements == 0) continue;
      const Trained got = train(layout, static_cast<int64_t>(b));
      int64_t row = 0, column = 0;  // where the next matrix's statistics are
      for (const TensorPlace& place : block.tensors) {
        if (place.frozen) continue;
        const bool vector = place.parameter.vector();
        for (const ParameterPart& part : place.parameter.parts) {
          SCOPED_TRACE(part.name);
          const int64_t rows = vector ? 1 : part.rows, columns = vector ? part.rows : place.parameter.columns;
          const int64_t first = place.offset + part.first * place.parameter.columns;
          const auto of_part = [&](const std::vector<float>& all) {
            return std::vector<float>(all.begin() + first, all.begin() + first + rows * columns);
          };
          std::vector<float> alone = of_part(of_block(block, 1)), of_rows(static_cast<size_t>(rows)),
                             of_columns(static_cast<size_t>(columns)),
                             scratch(static_cast<size_t>(factored_scratch(rows, columns)));
          for (uint32_t step = 1; step <= kSteps; ++step) {
            const std::vector<float> gradient = of_part(of_block(block, 10 + step));
            kernels(DeviceType::kCpu)
                .update({.rule = Adafactor::at({}, {.lr = 0.01, .weight_decay = vector ? 0 : 0.1, .t = step}),
                         .gradient = gradient.data(),
                         .weight = alone.data(),
                         .factored = {.rows = rows,
                                      .columns = columns,
                                      .row = vector ? nullptr : of_rows.data(),
                                      .column = vector ? nullptr : of_columns.data(),
                                      .vector = vector ? of_columns.data() : nullptr,
                                      .scratch = scratch.data()},
                         .elements = rows * columns},
                        {});
          }
          EXPECT_EQ(of_part(got.weights), alone);
          const auto expect_in = [](const std::vector<float>& stream, int64_t at,
                                    const std::vector<float>& want) {
            EXPECT_TRUE(std::equal(want.begin(), want.end(), stream.begin() + at));
          };
          if (vector) {
            expect_in(got.streams[2], block.count(0, first).vectors, of_columns);
          } else {
            expect_in(got.streams[0], row, of_rows);
            expect_in(got.streams[1], column, of_columns);
            row += round_up(rows, 64), column += round_up(columns, 64);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lm
