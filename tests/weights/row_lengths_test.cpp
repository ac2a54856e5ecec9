// DoRA's magnitudes begin as the lengths of the rows of W + s B A.
#include "weights/row_lengths.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/host_device.h"
#include "tests/support/llama_spec.h"
#include "weights/load_store.h"

namespace lm {
namespace {

float element(const std::byte* array, DType dtype, int64_t at) {
  return dtype == DType::kF32 ? reinterpret_cast<const float*>(array)[at]
                              : to_float(reinterpret_cast<const Bf16*>(array)[at]);
}

TEST(RowLengths, OfAFreshAdapterAreTheBasesOwn) {
  const ModelSpec spec = llama_spec({.ffn = 96, .layers = 2});
  const AdapterSpec adapter{
      .r = 4,
      .alpha = 6,
      .dora = true,
      .targets = resolve_targets(spec.names, {"q_proj", "v_proj", "down_proj"}, "test")};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const ModelLayout layout = make_layout(spec, &adapter, dtype);
    WeightStore store(layout, DType::kF32, DeviceType::kCpu);
    const StreamView stream{DeviceType::kCpu, nullptr, 1};
    const LoadSetup base{spec, layout, dtype, stream, 2}, adapters{spec, layout, DType::kF32, stream, 2};
    initialise_weights(base, 7, store);
    initialise_from_base(adapters, 7, {.directory = "", .dtype = dtype}, adapter, store);
    int magnitudes = 0;
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      for (const Trainable& entry : layout.blocks[b].trainables) {
        if (entry.role != TrainableRole::kMagnitude) continue;
        const TensorPlace &place = layout.blocks[b].tensors[entry.tensor],
                          &weight = layout.blocks[b].tensors[entry.owner];
        const OpenUnit open = store.open(static_cast<int64_t>(b), false);
        const std::byte *const got = open.tensor(place), *const rows = open.tensor(weight);
        const ParameterPart& part = weight.parameter.parts[entry.part];
        const int64_t columns = weight.parameter.columns;
        ASSERT_EQ(part.rows, place.parameter.rows);
        for (int64_t i = 0; i < part.rows; ++i) {
          double squares = 0;
          for (int64_t j = 0; j < columns; ++j)
            squares += std::pow(element(rows, dtype, (part.first + i) * columns + j), 2);
          ASSERT_NEAR(element(got, DType::kF32, i) / std::sqrt(squares), 1, 1e-6) << place.parameter.name;
        }
        ++magnitudes;
      }
    }
    EXPECT_EQ(magnitudes, 6);
  }
}

TEST(RowLengths, CountWhatAnAdapterAdds) {
  const std::vector<float> weight = {3, 0, 0, 1}, a = {0, 1}, b = {2, -0.5F};
  const MatrixRows rows = [&](int64_t first, int64_t n, float* to) {
    std::copy_n(weight.data() + first * 2, n * 2, to);
  };
  const std::vector<float> lengths =
      row_lengths({.weight = rows, .rows = 2, .columns = 2, .a = a, .b = b, .scale = 2}, 1);
  EXPECT_EQ(lengths, (std::vector<float>{5, 0}));  // (3, 4) and (0, 0)
}

}  // namespace
}  // namespace lm
