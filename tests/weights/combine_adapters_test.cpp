// Adapters combined into one. (tests/e2e/test_serve.py compares them with peft's.)
#include "export/combine_adapters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "export/export_adapter.h"
#include "tests/weights/support.h"
#include "weights/product_svd.h"

namespace lm {
namespace {

using test::contains;
using test::refusal;
using test::TemporaryDirectory;

ModelSpec tiny_spec() {
  return parse_model_spec(test::tiny_config().dump(), "config.json");
}

using Values = std::vector<float>;

// Each element has its own value, which `seed` turns.
Values values_of(const Parameter& parameter, int seed) {
  Values out(static_cast<size_t>(parameter.elements()));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = std::sin(static_cast<float>(i) * 0.7F + static_cast<float>(seed));
  return out;
}

void write_tiny(const std::string& directory, const AdapterSpec& adapter, int seed) {
  const ModelLayout layout = make_layout(tiny_spec(), &adapter, DType::kF32);
  Values values;
  const auto source = [&](size_t, const TensorPlace& place, int64_t) {
    values = values_of(place.parameter, seed);
    return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
  };
  write_adapter(directory, adapter, {"org/base", ""}, layout, source, {});
}

const TensorPlace& place_of(const CombinedAdapter& adapter, const std::string& end, size_t* block) {
  for (size_t b = 0; b < adapter.layout().blocks.size(); ++b) {
    for (const TensorPlace& place : adapter.layout().blocks[b].tensors) {
      *block = b;
      if (in_adapter(place.parameter.role) && place.parameter.name.ends_with(end)) return place;
    }
  }
  throw std::runtime_error("no " + end);
}

Values read(const CombinedAdapter& adapter, const std::string& end) {
  size_t block = 0;
  const TensorPlace& place = place_of(adapter, end, &block);
  Values out(static_cast<size_t>(place.parameter.elements()));
  std::memcpy(out.data(), adapter.view(block, place).memory, out.size() * sizeof(float));
  return out;
}

// B A of the first layer's module.
Values product(const Values& b, const Values& a, size_t r) {
  const size_t rows = b.size() / r, columns = a.size() / r;
  Values out(rows * columns, 0.0F);
  for (size_t i = 0; i < rows; ++i)
    for (size_t k = 0; k < r; ++k)
      for (size_t j = 0; j < columns; ++j) out[i * columns + j] += b[i * r + k] * a[k * columns + j];
  return out;
}
Values delta(const CombinedAdapter& adapter, const std::string& module) {
  const Values a = read(adapter, "layers.0." + module + ".lora_A");
  size_t block = 0;
  const TensorPlace& place = place_of(adapter, "layers.0." + module + ".lora_A", &block);
  return product(read(adapter, "layers.0." + module + ".lora_B"), a,
                 static_cast<size_t>(place.parameter.rows));
}

void expect_near(const Values& ours, const Values& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_NEAR(ours[i], theirs[i], 1e-4) << i;
}

class Combined : public testing::Test {
 protected:
  Combined() {
    write_tiny(directory_ / "a", {.r = 3, .alpha = 6, .targets = {"q_proj", "down_proj"}}, 1);
    write_tiny(directory_ / "b", {.r = 2, .alpha = 1, .targets = {"q_proj", "v_proj"}}, 2);
    write_tiny(directory_ / "c", {.r = 3, .alpha = 3, .targets = {"q_proj"}}, 3);
    write_tiny(directory_ / "dora", {.r = 3, .alpha = 3, .dora = true, .targets = {"q_proj"}}, 4);
  }
  WeightedAdapter named(const char* name, double weight) const { return {directory_ / name, weight}; }
  CombinedAdapter combine(const std::vector<WeightedAdapter>& adapters, const CombineOptions& options) const {
    return {tiny_spec(), adapters, options};
  }
  // The sum of their deltas of q_proj: the scales are 2, 0.5 and 1.
  Values sum(double of_a, double of_b) const {
    const CombinedAdapter a = combine({named("a", of_a)}, {}), b = combine({named("b", of_b)}, {});
    Values out = delta(a, "q_proj");
    const Values other = delta(b, "q_proj");
    for (size_t i = 0; i < out.size(); ++i) out[i] += other[i];
    return out;
  }

  TemporaryDirectory directory_;
};

TEST_F(Combined, CatIsTheWeightedSumAndRanksAddUp) {
  const CombinedAdapter both = combine({named("a", 0.5), named("b", -3)}, {.threads = 2});
  EXPECT_EQ(both.spec().rank_of("model.layers.0.self_attn.q_proj"), 5);
  EXPECT_EQ(both.spec().rank_of("model.layers.0.self_attn.v_proj"), 2);
  EXPECT_EQ(both.spec().rank_of("model.layers.1.mlp.down_proj"), 3);
  EXPECT_EQ(both.spec().scale_of("model.layers.0.self_attn.v_proj"), 1);
  expect_near(delta(both, "q_proj"), sum(0.5, -3));
  // The weight and the scale, 0.5 * 2, are in A.
  const CombinedAdapter alone = combine({named("a", 0.5)}, {});
  size_t block = 0;
  const TensorPlace& place = place_of(alone, "layers.0.down_proj.lora_A", &block);
  expect_near(read(alone, "layers.0.down_proj.lora_A"), values_of(place.parameter, 1));
}

TEST_F(Combined, SvdIsExactFromTheRankOfTheSumOn) {
  const std::vector<WeightedAdapter> two = {named("a", 0.5), named("b", -3)};
  const CombinedAdapter all = combine(two, {.how = Combination::kSvd, .rank = 5});
  EXPECT_EQ(all.spec().r, 5);
  EXPECT_TRUE(all.spec().ranks.empty());
  expect_near(delta(all, "q_proj"), sum(0.5, -3));
  EXPECT_EQ(combine(two, {.how = Combination::kSvd}).spec().r, 3);  // the largest one
  EXPECT_TRUE(contains(refusal([&] { combine(two, {.how = Combination::kSvd, .rank = 6}); }),
                       "rank 6 is more than the adapters' ranks together, 5"));
}

TEST_F(Combined, LinearAddsTheMatricesWithTheRootOfWeightAndScale) {
  const CombinedAdapter both = combine({named("a", 2), named("c", -4)}, {.how = Combination::kLinear});
  size_t block = 0;
  const TensorPlace& a = place_of(both, "layers.0.q_proj.lora_A", &block);
  Values expected = values_of(a.parameter, 1);
  const Values other = values_of(a.parameter, 3);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = 2 * expected[i] - 2 * other[i];
  expect_near(read(both, "layers.0.q_proj.lora_A"), expected);
  const TensorPlace& b = place_of(both, "layers.0.q_proj.lora_B", &block);
  expected = values_of(b.parameter, 1);
  const Values more = values_of(b.parameter, 3);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = 2 * expected[i] + 2 * more[i];
  expect_near(read(both, "layers.0.q_proj.lora_B"), expected);
  EXPECT_TRUE(contains(refusal([&] {
                         combine({named("a", 1), named("b", 1)}, {.how = Combination::kLinear});
                       }),
                       "have the ranks 3 and 2"));
}

TEST_F(Combined, DoraIsRefused) {
  EXPECT_TRUE(contains(refusal([&] { combine({named("a", 1), named("dora", 1)}, {}); }), "a DoRA adapter"));
}

TEST(ProductSvd, SingularValuesAreInLeftAndDescend) {
  constexpr size_t kRows = 7, kColumns = 5, kInner = 3;
  Values left(kRows * kInner), right(kInner * kColumns);
  for (size_t i = 0; i < left.size(); ++i) left[i] = std::sin(static_cast<float>(i * i));
  for (size_t i = 0; i < right.size(); ++i) right[i] = std::cos(static_cast<float>(3 * i * i));
  for (size_t i = 0; i < kRows; ++i) left[i * kInner + 2] = left[i * kInner];  // of rank 2
  const ProductSvd svd = product_svd(left, right, kInner, 4);
  expect_near(product(svd.left, svd.right, 4), product(left, right, kInner));
  double before = 1e9;
  for (size_t k = 0; k < 4; ++k) {
    double strength = 0, length = 0;
    for (size_t i = 0; i < kRows; ++i) strength += std::pow(svd.left[i * 4 + k], 2);
    for (size_t j = 0; j < kColumns; ++j) length += std::pow(svd.right[k * kColumns + j], 2);
    EXPECT_LE(strength, before);
    EXPECT_NEAR(length, k < 2 ? 1 : 0, 1e-6);
    before = strength;
  }
}

}  // namespace
}  // namespace lm
