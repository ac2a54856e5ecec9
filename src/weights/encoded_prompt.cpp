#include "weights/encoded_prompt.h"

#include <fmt/format.h>

#include <algorithm>

#include "spec/parameter.h"

namespace lm {
namespace {

constexpr int64_t kBandElements = int64_t{1} << 20;  // of a matrix

// A linear layer [out, in] on `rows` rows of x.
struct Layer {
  std::string name;
  int64_t in = 0, out = 0, rows = 0;
};

std::vector<float> multiply(const Layer& layer, const std::vector<float>& x, const ReadEncoder& read) {
  const auto of = [](int64_t i) { return static_cast<size_t>(i); };
  std::vector<float> bias(of(layer.out)), y(of(layer.rows * layer.out));
  read(layer.name + ".bias", 0, layer.out, bias.data());
  const int64_t band = std::clamp<int64_t>(kBandElements / layer.in, 1, layer.out);
  std::vector<float> weight(of(band * layer.in));
  for (int64_t first = 0; first < layer.out; first += band) {
    const int64_t rows = std::min(band, layer.out - first);
    read(layer.name + ".weight", first * layer.in, rows * layer.in, weight.data());
    for (int64_t j = 0; j < rows; ++j) {
      const float* const row = weight.data() + j * layer.in;
      for (int64_t t = 0; t < layer.rows; ++t) {
        const float* const from = x.data() + t * layer.in;
        double sum = bias[of(first + j)];
        for (int64_t i = 0; i < layer.in; ++i) sum += double{row[i]} * double{from[i]};
        y[of(t * layer.out + first + j)] = static_cast<float>(sum);
      }
    }
  }
  return y;
}

}  // namespace

std::vector<float> encoded_prompt(const EncoderShape& shape, const ReadEncoder& read) {
  const std::string prefix(kEncoderPrefix);
  std::vector<float> x(static_cast<size_t>(shape.tokens * shape.width));
  read(prefix + "embedding.weight", 0, shape.tokens * shape.width, x.data());
  const int64_t sizes[] = {shape.width, shape.hidden, shape.hidden, shape.width};
  for (size_t i = 0; i < 3; ++i) {
    x = multiply({fmt::format("{}mlp_head.{}", prefix, 2 * i), sizes[i], sizes[i + 1], shape.tokens}, x,
                 read);
    if (i == 2) break;
    for (float& value : x) value = value < 0 ? 0 : value;  // a NaN stays one
  }
  return x;
}

}  // namespace lm
