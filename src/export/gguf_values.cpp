#include "export/gguf_values.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/log.h"
#include "export/gguf_layers.h"
#include "export/gguf_tokenizer.h"

namespace lm {
namespace {

// llama.cpp's divisors of the frequencies, for the scaled RoPE of Llama 3.1.
std::vector<float> llama3_factors(const RopeSpec& rope) {
  const auto original = static_cast<double>(rope.original_max_position);
  std::vector<float> out;
  for (int64_t i = 0; i < rope.dim; i += 2) {
    const double frequency = std::pow(rope.theta, -static_cast<double>(i) / static_cast<double>(rope.dim));
    const double length = 2 * std::numbers::pi / frequency;
    if (length < original / rope.high_freq_factor) {
      out.push_back(1);
    } else if (length > original / rope.low_freq_factor) {
      out.push_back(static_cast<float>(rope.factor));
    } else {
      const double smooth =
          (original / length - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      out.push_back(static_cast<float>(1 / ((1 - smooth) / rope.factor + smooth)));
    }
  }
  return out;
}

// Frequencies of 0 have a divisor that leaves nothing of them, as llama.cpp's converter writes it.
std::vector<float> proportional_factors(const RopeSpec& rope) {
  std::vector<float> out(static_cast<size_t>(rope.dim / 2), 1e30F);
  std::fill_n(out.begin(), rope.turned, static_cast<float>(rope.factor));
  return out;
}

int64_t least_window(const ModelSpec& spec) {
  int64_t least = 0;
  for (const LayerSpec& layer : spec.layers) {
    const int64_t window = layer.attention().window;
    if (window > 0) least = least == 0 ? window : std::min(least, window);
  }
  return least;
}

class Describer {
 public:
  Describer(const ModelSpec& spec, const LlamaCpp& arch) : spec_(spec), arch_(arch), layers_(spec) {}

  GgufValues run(const GgufOptions& options) {
    general(options);
    sizes();
    ropes();
    windows();
    factors();
    add_tokenizer(options.tokenizer_dir, spec_.vocab, options.chat_template, values_, arch_.tokenizer);
    return std::move(values_);
  }

 private:
  std::string key(const char* name) const { return std::string(arch_.name) + "." + name; }
  void count(const char* name, int64_t value) { values_.add(key(name), static_cast<uint32_t>(value)); }
  void number(const char* name, double value) { values_.add(key(name), static_cast<float>(value)); }

  void general(const GgufOptions& options) {
    values_.add("general.architecture", std::string(arch_.name));
    values_.add("general.type", std::string("model"));
    values_.add("general.name", options.name);
    // llama.cpp's file type numbers.
    const uint32_t kind = options.type == GgufType::kF16 ? 1 : options.type == GgufType::kQ8_0 ? 7 : 32;
    values_.add("general.file_type", kind);
    values_.add("general.quantization_version", uint32_t{2});
  }

  // Up to the window's length a model that slides computes what one does that does not.
  int64_t context() const {
    if (arch_.learned_positions) return spec_.embedding.positions;
    const int64_t window = least_window(spec_);
    if (arch_.windows != LlamaCpp::Windows::kNone || window == 0 || window >= spec_.max_positions)
      return spec_.max_positions;
    log_note("FILE-26", fmt::format("llama.cpp has no sliding window in this architecture: the file declares "
                                    "a context of {} tokens, up to which the results are the same",
                                    window));
    return window;
  }

  void sizes() {
    const AttentionSpec& attention = layers_.attention();
    count("context_length", context());
    count("embedding_length", spec_.hidden);
    count("block_count", spec_.layer_count());
    by_layer("feed_forward_length", feed_forward);
    count("attention.head_count", attention.heads);
    by_layer("attention.head_count_kv", [](const LayerSpec& one) { return one.attention().kv_heads; });
    count("attention.key_length", attention.head_dim);
    count("attention.value_length", attention.head_dim);
    if (arch_.gemma4) {
      const int64_t sliding = layers_.sliding->head_dim;
      count("attention.key_length_swa", sliding);
      count("attention.value_length_swa", sliding);
      count("attention.shared_kv_layers", borrowers(spec_));
      count("embedding_length_per_layer_input", spec_.embedding.inputs.width);
    }
    if (const auto* const experts = spec_.layer(0).find<ExpertsSpec>()) {
      count("expert_count", experts->experts);
      count("expert_used_count", experts->chosen);
      count("expert_feed_forward_length", experts->ffn);
    }
    count("vocab_size", spec_.vocab);
    number(arch_.layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon",
           spec_.final_norm.eps);
  }
  // One number if it is that of all layers.
  void by_layer(const char* name, int64_t (*size)(const LayerSpec&)) {
    std::vector<int32_t> sizes;
    for (const LayerSpec& layer : spec_.layers) sizes.push_back(static_cast<int32_t>(size(layer)));
    if (std::ranges::adjacent_find(sizes, std::ranges::not_equal_to()) == sizes.end()) {
      count(name, sizes.front());
    } else {
      values_.add(key(name), sizes);
    }
  }

  void ropes() {
    if (arch_.turns == LlamaCpp::Turns::kAllOrNone)
      values_.add(key("rope.scaling.finetuned"), layers_.rope() != nullptr);
    if (layers_.rope() == nullptr) return;
    const RopeSpec& rope = *layers_.rope();
    count("rope.dimension_count", rope.dim);
    number("rope.freq_base", rope.theta);
    if (arch_.own_base_in_windows && layers_.sliding_rope != nullptr)
      number("rope.freq_base_swa", layers_.sliding_rope->theta);
    if (arch_.gemma4 && layers_.sliding_rope != nullptr)
      count("rope.dimension_count_swa", layers_.sliding_rope->dim);
    scaling(rope);
  }
  void scaling(const RopeSpec& rope) {
    const auto type = [&](const char* name) { values_.add(key("rope.scaling.type"), std::string(name)); };
    switch (rope.scaling) {
      case RopeSpec::Scaling::kLinear:
        type("linear");
        return number("rope.scaling.factor", rope.factor);
      case RopeSpec::Scaling::kYarn:
        type("yarn");
        return yarn(rope);
      case RopeSpec::Scaling::kLongRope:
        type("longrope");
        count("rope.scaling.original_context_length", rope.original_max_position);
        return number("rope.scaling.attn_factor", rope.attention_factor);
      case RopeSpec::Scaling::kNone:
      case RopeSpec::Scaling::kLlama3:  // a tensor, as proportional scaling
      case RopeSpec::Scaling::kProportional:
      case RopeSpec::Scaling::kDynamic:
        return;
    }
  }
  void yarn(const RopeSpec& rope) {
    number("rope.scaling.factor", rope.factor);
    count("rope.scaling.original_context_length", rope.original_max_position);
    if (arch_.position_scale) {
      number("rope.scaling.yarn_beta_fast", rope.beta_fast);
      number("rope.scaling.yarn_beta_slow", rope.beta_slow);
    }
    // Cosines and sines are multiplied by 1 + 0.1 ln(factor) there, and by attn_factor; yarn_log_multiplier
    // is mscale_all_dim, and of 1 it takes the first factor back.
    const double built_in = 1 + 0.1 * std::log(rope.factor);
    if (arch_.position_scale && std::abs(rope.attention_factor - 1) < 1e-6) {
      number("rope.scaling.yarn_log_multiplier", 1);
    } else if (std::abs(rope.attention_factor / built_in - 1) >= 1e-6) {
      number("rope.scaling.attn_factor", rope.attention_factor / built_in);
    }
  }

  void windows() {
    if (layers_.sliding == nullptr || arch_.windows == LlamaCpp::Windows::kNone) return;
    count("attention.sliding_window", layers_.sliding->window);
    constexpr const char* kPattern = "attention.sliding_window_pattern";
    if (arch_.windows == LlamaCpp::Windows::kList) {
      std::vector<bool> slides;
      for (const LayerSpec& layer : spec_.layers) slides.push_back(layer.attention().window > 0);
      values_.add(key(kPattern), slides);
    } else if (full_each(spec_, arch_) != arch_.full_each) {
      count(kPattern, full_each(spec_, arch_).value_or(0));
    }
  }

  void factors() {
    const AttentionSpec& attention = layers_.attention();
    if (arch_.scale == LlamaCpp::Scale::kGiven) number("attention.scale", attention.scale());
    if (arch_.embedding == LlamaCpp::Embedding::kGiven) number("embedding_scale", spec_.embedding.scale);
    if (arch_.residual_scale) number("residual_scale", spec_.layers.front().sublayers.front().residual_scale);
    switch (arch_.logits) {
      case LlamaCpp::Logits::kPlain:
        break;
      case LlamaCpp::Logits::kMultiplied:
        number("logit_scale", spec_.head.logit_scale);
        break;
      case LlamaCpp::Logits::kDivided:
        number("logit_scale", 1 / spec_.head.logit_scale);
        break;
    }
    if (attention.softcap > 0) number("attn_logit_softcapping", attention.softcap);
    if (spec_.head.logit_cap > 0) number("final_logit_softcapping", spec_.head.logit_cap);
    if (attention.position_slope > 0) number("attention.temperature_scale", attention.position_slope);
  }

  const ModelSpec& spec_;
  const LlamaCpp& arch_;
  GgufLayers layers_;
  GgufValues values_;
};

}  // namespace

GgufValues describe(const ModelSpec& spec, const LlamaCpp& arch, const GgufOptions& options) {
  return Describer(spec, arch).run(options);
}

std::vector<RopeFactors> rope_factors(const ModelSpec& spec) {
  const RopeSpec* const rope = GgufLayers(spec).rope();
  if (rope == nullptr) return {};
  const auto floats = [](const std::vector<double>& from) {
    return std::vector<float>(from.begin(), from.end());
  };
  switch (rope->scaling) {
    case RopeSpec::Scaling::kLlama3:
      return {{"rope_freqs.weight", llama3_factors(*rope)}};
    case RopeSpec::Scaling::kProportional:
      return {{"rope_freqs.weight", proportional_factors(*rope)}};
    case RopeSpec::Scaling::kLongRope:
      return {{"rope_factors_long.weight", floats(rope->long_factors)},
              {"rope_factors_short.weight", floats(rope->short_factors)}};
    case RopeSpec::Scaling::kNone:
    case RopeSpec::Scaling::kLinear:
    case RopeSpec::Scaling::kYarn:
    case RopeSpec::Scaling::kDynamic:
      break;
  }
  return {};
}

}  // namespace lm
