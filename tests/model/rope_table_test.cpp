// RopeTable beside the frequencies of its spec: the run's length, and the factor of cosines and sines.
#include <gtest/gtest.h>

#include <cmath>

#include "base/host_device.h"
#include "kernels/runtime.h"
#include "model/context.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

class RopeTables : public ::testing::Test {
 protected:
  RopeTable table(const RopeSpec& rope, int64_t positions, DType dtype = DType::kF32) {
    ModelSpec spec = llama_spec({});
    spec.ropes = {rope};
    return {spec, positions, dtype, DeviceType::kCpu, stream_};
  }

 private:
  StreamView stream_ = start_torch(DeviceType::kCpu, 1, true);
};

TEST_F(RopeTables, AreForTextsAsLongAsTheRuns) {
  RopeSpec rope{.dim = 4, .scaling = RopeSpec::Scaling::kLongRope, .original_max_position = 8};
  rope.short_factors = {1, 1};
  rope.long_factors = {2, 4};
  const RopeTable of_short = table(rope, 8), of_long = table(rope, 9);
  // Position 1 of each.
  EXPECT_EQ(of_short.sin(0)[2], std::sin(1.F));
  EXPECT_EQ(of_long.sin(0)[2], std::sin(0.5F));
}

TEST_F(RopeTables, HoldTheFactorOfCosinesAndSines) {
  RopeSpec rope{.dim = 4, .theta = 100};
  const RopeTable plain = table(rope, 5);
  rope.attention_factor = 1.1902380714;
  const RopeTable scaled = table(rope, 5), rounded = table(rope, 5, DType::kBF16);
  const auto factor = static_cast<float>(rope.attention_factor);
  for (int64_t i = 0; i < 5 * 2; ++i) {
    EXPECT_EQ(scaled.cos(0)[i], plain.cos(0)[i] * factor);
    EXPECT_EQ(scaled.sin(0)[i], plain.sin(0)[i] * factor);
    EXPECT_EQ(rounded.cos(0)[i], to_float(to_bf16(scaled.cos(0)[i])));
  }
}

TEST_F(RopeTables, AModelWithoutRopeHasNone) {
  ModelSpec spec = llama_spec({});
  spec.ropes.clear();
  EXPECT_EQ(RopeTable::bytes(spec, 100), 0);
  const RopeTable none(spec, 100, DType::kF32, DeviceType::kCpu, {DeviceType::kCpu, nullptr, 1});
  EXPECT_EQ(none.positions(), 100);
}

}  // namespace
}  // namespace lm
