#include "spec/architecture.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lm {
namespace {

// Of one field; the first difference stays.
class Comparison {
 public:
  template <class T>
  void field(const std::string& name, const T& model, const T& other) {
    if (!difference_.empty() || model == other) return;
    difference_ = fmt::format("{} is {}, not {}", name, text(other), text(model));
  }
  const std::string& difference() const { return difference_; }

 private:
  static std::string text(const std::string& value) { return "\"" + value + "\""; }
  static std::string text(bool value) { return value ? "true" : "false"; }
  template <class T>
  requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) static std::string text(T value) {
    return fmt::format("{}", value);
  }
  template <class E>
  requires std::is_enum_v<E>
  static std::string text(E value) { return fmt::format("of kind {}", static_cast<int>(value)); }
  static std::string text(const std::vector<double>& value) {
    return fmt::format("[{}]", fmt::join(value, ", "));
  }
  std::string difference_;
};

void compare(const std::optional<NormSpec>& a, const std::optional<NormSpec>& b, const std::string& what,
             Comparison& found) {
  found.field(what, a.has_value(), b.has_value());
  if (!a || !b) return;
  found.field(what, a->kind, b->kind);
  found.field("the eps of " + what, a->eps, b->eps);
}

// The fields of a mixer, in the words of config.json where it has one.
void compare(const AttentionSpec& a, const AttentionSpec& b, const std::string& of, Comparison& found) {
  found.field("num_attention_heads" + of, a.heads, b.heads);
  found.field("num_key_value_heads" + of, a.kv_heads, b.kv_heads);
  found.field("head_dim" + of, a.head_dim, b.head_dim);
  compare(a.head_norm, b.head_norm, "the norm of q's and k's heads" + of, found);
  found.field("the use of one norm for all heads" + of, a.joint_norm, b.joint_norm);
  found.field("the use of a norm of each head's own" + of, a.own_norms, b.own_norms);
  compare(a.value_norm, b.value_norm, "the norm of v's heads" + of, found);
  found.field("attention_k_eq_v" + of, a.values_are_keys, b.values_are_keys);
  found.field("the layer whose keys and values are read" + of, a.source, b.source);
  found.field("the sliding window" + of, a.window, b.window);
  found.field("the use of RoPE" + of, a.rotates(), b.rotates());
  found.field("the RoPE table" + of, a.rope, b.rope);
  found.field("the bias of q, k and v" + of, a.qkv_bias, b.qkv_bias);
  found.field("the bias of the attention's output" + of, a.out_bias, b.out_bias);
  found.field("the softmax's scale" + of, a.scale(), b.scale());
  found.field("attn_logit_softcapping" + of, a.softcap, b.softcap);
  found.field("the use of attention sinks" + of, a.sinks, b.sinks);
  found.field("llama_4_scaling_beta" + of, a.position_slope, b.position_slope);
  found.field("the positions by which queries are scaled" + of, a.position_period, b.position_period);
}
void compare(const LayerInputSpec& a, const LayerInputSpec& b, const std::string& of, Comparison& found) {
  found.field("the activation of the layer's input" + of, a.activation, b.activation);
}
void compare(const ExpertsSpec& a, const ExpertsSpec& b, const std::string& of, Comparison& found) {
  found.field("num_experts" + of, a.experts, b.experts);
  found.field("num_experts_per_tok" + of, a.chosen, b.chosen);
  found.field("the width of the experts" + of, a.ffn, b.ffn);
  found.field("norm_topk_prob" + of, a.renormalise, b.renormalise);
  found.field("the rounding of the router's weights" + of, a.round_weights, b.round_weights);
  found.field("the router's scores" + of, a.scores, b.scores);
  found.field("n_group" + of, a.groups, b.groups);
  found.field("topk_group" + of, a.kept_groups, b.kept_groups);
  found.field("routed_scaling_factor" + of, a.weight_scale, b.weight_scale);
  found.field("the type of the router's logits" + of, a.wide_logits, b.wide_logits);
  found.field("the bias of the router" + of, a.router_bias, b.router_bias);
  found.field("the bias of the experts" + of, a.bias, b.bias);
  compare(a.input_norm, b.input_norm, "the norm of the experts' input" + of, found);
  compare(a.router_norm, b.router_norm, "the norm of the router's input" + of, found);
  found.field("the factors of the router's weights" + of, a.factors, b.factors);
  found.field("the use of a clamped GLU" + of, a.clamped.has_value(), b.clamped.has_value());
  const ClampedGlu ours = a.clamped.value_or(ClampedGlu()), theirs = b.clamped.value_or(ClampedGlu());
  found.field("swiglu_alpha" + of, ours.alpha, theirs.alpha);
  found.field("swiglu_limit" + of, ours.limit, theirs.limit);
  found.field("the activation" + of, a.activation, b.activation);
}
void compare(const SharedExpertSpec& a, const SharedExpertSpec& b, const std::string& of, Comparison& found) {
  found.field("the width of the shared expert" + of, a.ffn, b.ffn);
  found.field("the gate of the shared expert" + of, a.gated, b.gated);
  found.field("the activation" + of, a.activation, b.activation);
}
// Of an MLP with a gate or without one.
template <class Mlp>
requires requires(const Mlp& mlp) {
  mlp.ffn;
}
void compare(const Mlp& a, const Mlp& b, const std::string& of, Comparison& found) {
  found.field("intermediate_size" + of, a.ffn, b.ffn);
  found.field("the activation" + of, a.activation, b.activation);
  found.field("the bias of the MLP" + of, a.bias, b.bias);
}

void compare_layers(const LayerSpec& a, const LayerSpec& b, const std::string& of, Comparison& found) {
  found.field("the number of sublayers" + of, std::ssize(a.sublayers), std::ssize(b.sublayers));
  for (size_t s = 0; s < std::min(a.sublayers.size(), b.sublayers.size()); ++s) {
    const SublayerSpec &ours = a.sublayers[s], &theirs = b.sublayers[s];
    found.field("the place of a sublayer beside another" + of, ours.beside, theirs.beside);
    compare(ours.norm, theirs.norm, "the norm before a sublayer" + of, found);
    compare(ours.norm_after, theirs.norm_after, "the norm after a sublayer" + of, found);
    compare(ours.norm_joined, theirs.norm_joined, "the norm of several sublayers" + of, found);
    found.field("the residual scale" + of, ours.residual_scale, theirs.residual_scale);
    found.field("the kind of a sublayer" + of, ours.mixer.index(), theirs.mixer.index());
    std::visit(
        [&](const auto& mixer) {
          if (const auto* other = std::get_if<std::decay_t<decltype(mixer)>>(&theirs.mixer))
            compare(mixer, *other, of, found);
        },
        ours.mixer);
  }
  found.field("the layer_scalar" + of, a.scalar, b.scalar);
}

void compare_ropes(const RopeSpec& a, const RopeSpec& b, Comparison& found) {
  found.field("rope_theta", a.theta, b.theta);
  found.field("the number of features that RoPE turns", a.dim, b.dim);
  found.field("the use of neighbours as RoPE's pairs", a.neighbours, b.neighbours);
  found.field("the scaling of RoPE", a.scaling, b.scaling);
  if (a.scaling != b.scaling) return;
  const auto factor = [&] { found.field("the factor of RoPE's scaling", a.factor, b.factor); };
  const auto original = [&] {
    found.field("original_max_position_embeddings", a.original_max_position, b.original_max_position);
  };
  const auto attention = [&] {
    found.field("RoPE's attention_factor", a.attention_factor, b.attention_factor);
  };
  switch (a.scaling) {
    case RopeSpec::Scaling::kNone:
      return;
    case RopeSpec::Scaling::kLinear:
      return factor();
    case RopeSpec::Scaling::kDynamic:
      return factor(), original();
    case RopeSpec::Scaling::kLlama3:
      factor(), original();
      found.field("low_freq_factor", a.low_freq_factor, b.low_freq_factor);
      found.field("high_freq_factor", a.high_freq_factor, b.high_freq_factor);
      return;
    case RopeSpec::Scaling::kYarn:
      factor(), original(), attention();
      found.field("beta_fast", a.beta_fast, b.beta_fast);
      found.field("beta_slow", a.beta_slow, b.beta_slow);
      found.field("truncate", a.truncate, b.truncate);
      return;
    case RopeSpec::Scaling::kLongRope:
      original(), attention();
      found.field("short_factor", a.short_factors, b.short_factors);
      found.field("long_factor", a.long_factors, b.long_factors);
      return;
    case RopeSpec::Scaling::kProportional:
      factor();
      found.field("partial_rotary_factor", a.turned, b.turned);
      return;
  }
}

}  // namespace

std::string architecture_difference(const ModelSpec& model, const ModelSpec& other) {
  Comparison found;
  found.field("model_type", model.model_type, other.model_type);
  found.field("hidden_size", model.hidden, other.hidden);
  found.field("vocab_size", model.vocab, other.vocab);
  found.field("tie_word_embeddings", model.tied, other.tied);
  compare(model.final_norm, other.final_norm, "the final norm", found);
  found.field("the embedding's factor", model.embedding.scale, other.embedding.scale);
  found.field("the rounding of the embedding's factor", model.embedding.round_scale,
              other.embedding.round_scale);
  found.field("the number of learned positions", model.embedding.positions, other.embedding.positions);
  const InputsSpec &inputs = model.embedding.inputs, &theirs = other.embedding.inputs;
  found.field("hidden_size_per_layer_input", inputs.width, theirs.width);
  found.field("vocab_size_per_layer_input", inputs.vocab, theirs.vocab);
  if (inputs.width > 0) compare(inputs.norm, theirs.norm, "the norm of the layers' inputs", found);
  found.field("num_labels", std::ssize(model.score.labels), std::ssize(other.score.labels));
  found.field("logit_scale", model.head.logit_scale, other.head.logit_scale);
  found.field("final_logit_softcapping", model.head.logit_cap, other.head.logit_cap);
  found.field("num_hidden_layers", model.layer_count(), other.layer_count());
  for (int64_t i = 0; i < std::min(model.layer_count(), other.layer_count()); ++i)
    compare_layers(model.layer(i), other.layer(i), fmt::format(" of layer {}", i), found);
  found.field("the number of RoPE tables", std::ssize(model.ropes), std::ssize(other.ropes));
  for (size_t i = 0; i < std::min(model.ropes.size(), other.ropes.size()); ++i)
    compare_ropes(model.ropes[i], other.ropes[i], found);
  return found.difference();
}

}  // namespace lm
