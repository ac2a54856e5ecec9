// Frequencies of RoPE tables, and how far a model's positions reach.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "spec/model_spec.h"

namespace lm {
namespace {

// The few roundings here are all that there is to agree on with the reference: each line is fp32 in its
// order. It divides a number by a tensor, which torch computes as reciprocal × number.

// base^exponent: fp64 inside, rounded once, and so within one unit of the last place of any good fp32 power.
float power(float base, float exponent) {
  return static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
}

// base^(2i / dim): the wavelength of pair i by 2 pi.
float wave(float base, size_t i, int64_t dim) {
  return power(base, static_cast<float>(2 * i) / static_cast<float>(dim));
}

// theta as it is for texts of `longest` tokens. The reference computes it in fp64 up to the positions that
// the model knows, and as a tensor beyond.
float dynamic_theta(const RopeSpec& rope, int64_t longest) {
  const auto dim = static_cast<double>(rope.dim);
  const double exponent = dim / (dim - 2), known = static_cast<double>(rope.original_max_position);
  if (longest <= rope.original_max_position) {
    const double stretched = rope.factor * known / known - (rope.factor - 1);
    return static_cast<float>(rope.theta * std::pow(stretched, exponent));
  }
  const float stretched = static_cast<float>(rope.factor) * static_cast<float>(longest) /
                              static_cast<float>(rope.original_max_position) -
                          static_cast<float>(rope.factor - 1);
  return power(stretched, static_cast<float>(exponent)) * static_cast<float>(rope.theta);
}

float llama3_frequency(const RopeSpec& rope, float f) {
  const float factor = static_cast<float>(rope.factor);
  const float low = static_cast<float>(rope.low_freq_factor);
  const float spread = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  const float original = static_cast<float>(rope.original_max_position);
  const float low_wavelength =
      static_cast<float>(static_cast<double>(rope.original_max_position) / rope.low_freq_factor);
  const float high_wavelength =
      static_cast<float>(static_cast<double>(rope.original_max_position) / rope.high_freq_factor);
  const float wavelength = (1.0f / f) * static_cast<float>(2 * std::numbers::pi);
  if (wavelength > low_wavelength) return f / factor;
  if (wavelength < high_wavelength) return f;
  const float smooth = ((1.0f / wavelength) * original - low) / spread;
  return (1.0f - smooth) * f / factor + smooth * f;
}

// Between these pairs yarn blends from frequencies as they are to divided ones.
struct YarnRange {
  double low = 0, high = 0;
};
YarnRange yarn_range(const RopeSpec& rope) {
  const auto dim = static_cast<double>(rope.dim);
  const auto pair = [&](double turns) {
    const double known = static_cast<double>(rope.original_max_position);
    return dim * std::log(known / (turns * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
  };
  YarnRange out{pair(rope.beta_fast), pair(rope.beta_slow)};
  if (rope.truncate) out = {std::floor(out.low), std::ceil(out.high)};
  out = {std::max(out.low, 0.0), std::min(out.high, dim - 1)};
  if (out.low == out.high) out.high += 0.001;
  return out;
}

float yarn_frequency(const RopeSpec& rope, const YarnRange& range, size_t i) {
  const float pair = static_cast<float>(i), wavelength = wave(static_cast<float>(rope.theta), i, rope.dim);
  const float kept = 1.0f / wavelength, divided = 1.0f / (static_cast<float>(rope.factor) * wavelength);
  const float ramp = std::clamp(
      (pair - static_cast<float>(range.low)) / static_cast<float>(range.high - range.low), 0.0f, 1.0f);
  const float keep = 1.0f - ramp;
  return divided * (1.0f - keep) + kept * keep;
}

}  // namespace

std::vector<float> rope_frequencies(const RopeSpec& rope, int64_t longest) {
  const float theta = static_cast<float>(rope.theta), factor = static_cast<float>(rope.factor);
  std::vector<float> out(static_cast<size_t>(rope.dim / 2));
  const auto fill = [&](const auto& frequency) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = frequency(i);
  };
  switch (rope.scaling) {
    case RopeSpec::Scaling::kNone:
      fill([&](size_t i) { return 1.0f / wave(theta, i, rope.dim); });
      break;
    case RopeSpec::Scaling::kLinear:
      fill([&](size_t i) { return 1.0f / wave(theta, i, rope.dim) / factor; });
      break;
    case RopeSpec::Scaling::kLlama3:
      fill([&](size_t i) { return llama3_frequency(rope, 1.0f / wave(theta, i, rope.dim)); });
      break;
    case RopeSpec::Scaling::kDynamic: {
      const float stretched = dynamic_theta(rope, longest);
      fill([&](size_t i) { return 1.0f / wave(stretched, i, rope.dim); });
      break;
    }
    case RopeSpec::Scaling::kYarn: {
      const YarnRange range = yarn_range(rope);
      fill([&](size_t i) { return yarn_frequency(rope, range, i); });
      break;
    }
    case RopeSpec::Scaling::kLongRope: {
      const std::vector<double>& factors =
          longest > rope.original_max_position ? rope.long_factors : rope.short_factors;
      LM_CHECK(factors.size() == out.size(), "longrope has a factor for each frequency");
      fill([&](size_t i) { return 1.0f / (static_cast<float>(factors[i]) * wave(theta, i, rope.dim)); });
      break;
    }
    case RopeSpec::Scaling::kProportional:
      fill([&](size_t i) {
        return static_cast<int64_t>(i) < rope.turned ? 1.0f / wave(theta, i, rope.dim) / factor : 0.0f;
      });
      break;
  }
  return out;
}

int64_t ModelSpec::longest_text() const {
  // A learned table has no row beyond its last.
  if (embedding.positions > 0) return embedding.positions;
  int64_t longest = max_positions;
  for (const RopeSpec& rope : ropes) {
    const auto reach = [&](int64_t positions) {
      const double scaled = std::min(rope.factor * static_cast<double>(positions), 1e15);
      longest = std::max(longest, static_cast<int64_t>(scaled));
    };
    switch (rope.scaling) {
      case RopeSpec::Scaling::kNone:
        break;
      case RopeSpec::Scaling::kLinear:  // files name the positions before scaling or after it
      case RopeSpec::Scaling::kDynamic:
      case RopeSpec::Scaling::kProportional:
        reach(max_positions);
        break;
      case RopeSpec::Scaling::kLlama3:
      case RopeSpec::Scaling::kYarn:
      case RopeSpec::Scaling::kLongRope:
        reach(rope.original_max_position);
        break;
    }
  }
  return longest;
}

}  // namespace lm
