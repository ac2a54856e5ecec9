// P-tuning's encoder on the host: fresh values as torch's, and what it makes of its tokens.
#include "weights/encoded_prompt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "tests/support/llama_spec.h"
#include "weights/initialise.h"

namespace lm {
namespace {

using Tensors = std::map<std::string, std::vector<float>>;

Tensors random_encoder(const EncoderShape& shape) {
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  Tensors out;
  const auto add = [&](const std::string& name, int64_t elements, float scale) {
    for (int64_t i = 0; i < elements; ++i) out["prompt_encoder." + name].push_back(scale * normal(engine));
  };
  const int64_t sizes[] = {shape.width, shape.hidden, shape.hidden, shape.width};
  add("embedding.weight", shape.tokens * shape.width, 1);
  for (size_t i = 0; i < 3; ++i) {
    const std::string layer = "mlp_head." + std::to_string(2 * i);
    add(layer + ".weight", sizes[i + 1] * sizes[i], 1 / std::sqrt(static_cast<float>(sizes[i])));
    add(layer + ".bias", sizes[i + 1], 0.5F);
  }
  return out;
}

// y = x Wᵀ + b of one row.
std::vector<double> layer(const Tensors& tensors, const std::string& name, const std::vector<double>& x,
                          bool rectified) {
  const std::vector<float>&weight = tensors.at(name + ".weight"), &bias = tensors.at(name + ".bias");
  std::vector<double> out;
  for (size_t row = 0; row < bias.size(); ++row) {
    double sum = bias[row];
    for (size_t i = 0; i < x.size(); ++i) sum += double{weight[row * x.size() + i]} * x[i];
    out.push_back(rectified ? std::max(sum, 0.0) : sum);
  }
  return out;
}

// The second shape's matrices are read in several bands.
TEST(EncodedPrompt, IsTheMlpOfEachToken) {
  for (const EncoderShape& shape : {EncoderShape{3, 5, 4}, EncoderShape{1, 9, 1100}}) {
    const Tensors tensors = random_encoder(shape);
    const std::vector<float> got =
        encoded_prompt(shape, [&](const std::string& name, int64_t first, int64_t elements, float* out) {
          const std::vector<float>& all = tensors.at(name);
          ASSERT_LE(first + elements, std::ssize(all));
          std::copy_n(all.begin() + first, elements, out);
        });
    ASSERT_EQ(std::ssize(got), shape.tokens * shape.width);
    for (int64_t t = 0; t < shape.tokens; ++t) {
      const auto token = tensors.at("prompt_encoder.embedding.weight").begin() + t * shape.width;
      std::vector<double> x(token, token + shape.width);
      for (const char* const number : {"0", "2", "4"})
        x = layer(tensors, std::string("prompt_encoder.mlp_head.") + number, x, *number != '4');
      for (size_t i = 0; i < x.size(); ++i)
        EXPECT_NEAR(got[static_cast<size_t>(t * shape.width) + i], x[i], 1e-5 * (1 + std::abs(x[i])));
    }
  }
}

// nn.Embedding and nn.Linear: weights and biases within 1 / sqrt(inputs), and up to it.
TEST(EncodedPrompt, BeginsAsTorchsLayers) {
  const ModelSpec spec = llama_spec({.ffn = 96, .layers = 2});
  AdapterSpec adapter;
  adapter.kind = AdapterKind::kPrompt;
  adapter.virtual_tokens = 40;
  adapter.encoder = 600;
  const ModelLayout layout = make_layout(spec, &adapter, DType::kF32);
  const BlockLayout& block = layout.blocks.front();
  for (const Trainable& entry : block.trainables) {
    const TensorPlace& place = block.tensors[entry.tensor];
    const Parameter& parameter = place.parameter;
    SCOPED_TRACE(parameter.name);
    std::vector<float> values(static_cast<size_t>(parameter.elements()));
    initialise({parameter, 7, place.number, DType::kF32}, reinterpret_cast<std::byte*>(values.data()), 0,
               parameter.rows);
    double squares = 0, largest = 0, sum = 0;
    for (const float value : values) {
      squares += double{value} * double{value}, sum += double{value};
      largest = std::max(largest, std::abs(double{value}));
    }
    const auto n = static_cast<double>(values.size());
    const double deviation = std::sqrt(squares / n);
    EXPECT_LT(std::abs(sum / n), 4 * deviation / std::sqrt(n));
    if (entry.role == TrainableRole::kPrompt) {
      EXPECT_NEAR(deviation, 1, 0.1);
      continue;
    }
    const double bound = 1 / std::sqrt(static_cast<double>(
                                 parameter.name.starts_with("encoder.0") ? spec.hidden : adapter.encoder));
    EXPECT_LE(largest, bound);
    EXPECT_GT(largest, 0.9 * bound);
    EXPECT_NEAR(deviation, bound / std::sqrt(3.0), 0.15 * bound);
  }
}

}  // namespace
}  // namespace lm
