#include "spec/architecture.h"

#include <fmt/format.h>

namespace lm {
namespace {

// Of one field; the first difference stays.
class Comparison {
 public:
  template <class T>
  void field(const char* name, const T& model, const T& other) {
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
  std::string difference_;
};

void compare_layers(const ModelSpec& model, const ModelSpec& other, Comparison& found) {
  found.field("num_hidden_layers", model.layer_count(), other.layer_count());
  for (int64_t i = 0; i < std::min(model.layer_count(), other.layer_count()); ++i) {
    const LayerSpec &a = model.layer(i), &b = other.layer(i);
    const std::string of = fmt::format(" of layer {}", i);
    found.field(("the norm" + of).c_str(), a.norm, b.norm);
    found.field(("the attention" + of).c_str(), a.attention, b.attention);
    found.field(("the MLP" + of).c_str(), a.mlp, b.mlp);
    found.field(("the sliding window" + of).c_str(), a.window, b.window);
    found.field(("the use of RoPE" + of).c_str(), a.rope, b.rope);
    found.field(("the bias of q, k and v" + of).c_str(), a.qkv_bias, b.qkv_bias);
    found.field(("the bias of the attention's output" + of).c_str(), a.o_bias, b.o_bias);
    found.field(("the bias of the MLP" + of).c_str(), a.mlp_bias, b.mlp_bias);
  }
}

}  // namespace

std::string architecture_difference(const ModelSpec& model, const ModelSpec& other) {
  Comparison found;
  found.field("model_type", model.model_type, other.model_type);
  found.field("hidden_size", model.hidden, other.hidden);
  found.field("intermediate_size", model.ffn, other.ffn);
  found.field("num_attention_heads", model.heads, other.heads);
  found.field("num_key_value_heads", model.kv_heads, other.kv_heads);
  found.field("head_dim", model.head_dim, other.head_dim);
  found.field("vocab_size", model.vocab, other.vocab);
  found.field("tie_word_embeddings", model.tied, other.tied);
  compare_layers(model, other, found);
  found.field("rms_norm_eps", model.rms_eps, other.rms_eps);
  found.field("rope_theta", model.rope_theta, other.rope_theta);
  found.field("the scaling of RoPE", model.rope.type, other.rope.type);
  if (model.rope.type == RopeScaling::Type::kNone) return found.difference();
  found.field("the factor of RoPE's scaling", model.rope.factor, other.rope.factor);
  if (model.rope.type == RopeScaling::Type::kLinear) return found.difference();
  found.field("low_freq_factor", model.rope.low_freq_factor, other.rope.low_freq_factor);
  found.field("high_freq_factor", model.rope.high_freq_factor, other.rope.high_freq_factor);
  found.field("original_max_position_embeddings", model.rope.original_max_position,
              other.rope.original_max_position);
  return found.difference();
}

}  // namespace lm
