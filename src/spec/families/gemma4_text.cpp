// Gemma 4: Gemma 3 with ordinary norm weights, normed values, layers without a window that have wider heads
// (and may take their keys for values), and a number that each layer's output is multiplied by. The sizes
// with experts or with inputs for each layer are not implemented.
#include <fmt/format.h>
#include <algorithm>
#include <charconv>

#include "spec/families/gemma.h"

namespace lm::families {
namespace {

const Json& assumed_ropes() {
  static const Json entries = {
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}},
      {"full_attention",
       {{"rope_type", "proportional"}, {"partial_rotary_factor", 0.25}, {"rope_theta", 1e6}}}};
  return entries;
}

void refuse_the_others(const ConfigReader& config) {
  if (config.boolean("enable_moe_block", false))
    config.fail("enable_moe_block", "= true is not supported yet: it needs experts");
  if (config.count("num_kv_shared_layers", 0, kMostPositions) > 0)
    config.fail("num_kv_shared_layers", "is not supported yet: layers with the keys and values of others");
}

// Layers without a window may have heads of another size: per_layer_config, by the layer's number, or two
// keys of older files.
void read_layer_sizes(const ConfigReader& config, ModelSpec& spec) {
  constexpr const char* kLayers = "per_layer_config";
  constexpr const char *kDim = "head_dim", *kHeads = "num_key_value_heads";
  if (config.find(kLayers) || config.is_null(kLayers)) {
    static const Json none = Json::object();
    const Json& layers = config.find(kLayers) ? *config.find(kLayers) : none;
    const ConfigReader entries = config.inside(kLayers, layers);
    for (const auto& [number, entry] : layers.items()) {
      size_t layer = 0;
      const char* const end = number.data() + number.size();
      const auto parsed = std::from_chars(number.data(), end, layer);
      if (parsed.ec != std::errc() || parsed.ptr != end || layer >= spec.layers.size())
        config.fail(kLayers, "names no layer by \"" + number.substr(0, 100) + "\"");
      const ConfigReader one = entries.inside(number.c_str(), entry);
      for (const auto& [key, value] : entry.items()) {
        if (key != kDim && key != kHeads)
          one.fail(key.substr(0, 100), "is not supported: layers differ in it");
      }
      AttentionSpec& attention = spec.layers[layer].attention();
      attention.head_dim = one.size(kDim, attention.head_dim, kMostHeadDim);
      attention.kv_heads = one.size(kHeads, attention.kv_heads, kMostHeads);
      check_heads(one, attention);
    }
    return;
  }
  const int64_t dim = config.size("global_head_dim", 512, kMostHeadDim);
  const bool shared = config.boolean("attention_k_eq_v", false);
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    if (attention.window > 0) continue;
    attention.head_dim = dim;
    if (shared)
      attention.kv_heads = config.size("num_global_key_value_heads", attention.kv_heads, kMostHeads);
    check_heads(config, attention);
  }
}

}  // namespace

NameMap gemma4_names() {
  NameMap names = four_norm_names();
  names.scalar = "layer_scalar";
  return names;
}

void read_gemma4_layers(const ConfigReader& config, int64_t window, ModelSpec& spec) {
  refuse_the_others(config);
  refuse_if_set(config, spec, "mlp_bias");
  add_norms_after(spec);
  read_attention_bias(config, spec);
  scale_embedding(spec);
  read_pattern(config, config.size("sliding_window", window, kMostPositions), 6, spec);
  spec.layers.back().attention().window = 0;  // whatever the list says, as the reference has it
  read_layer_sizes(config, spec);
  const bool shared = config.boolean("attention_k_eq_v", false);
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    attention.softmax_scale = 1;
    attention.head_norm = spec.final_norm;
    attention.value_norm = {.kind = NormKind::kRmsPlain, .eps = spec.final_norm.eps};
    attention.values_are_keys = shared && attention.window == 0;
    layer.scalar = true;
  }
  spec.head.logit_cap = read_cap(config, "final_logit_softcapping", 0);
}

void read_gemma4_ropes(const ConfigReader& config, const Family&, ModelSpec& spec) {
  read_rope_entries(config, assumed_ropes(), spec);
}

namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  constexpr const char* kInputs = "hidden_size_per_layer_input";
  if (!config.is_null(kInputs) && config.count(kInputs, 256, kMostPositions) > 0)
    config.fail(kInputs,
                "other than 0 is not supported yet: inputs for each layer (0 where it is missing: 256)");
  read_gemma4_layers(config, 512, spec);
}

}  // namespace

constinit const Family gemma4_text = [] {
  Family out = kGemma4;
  out.model_type = "gemma4_text";
  out.architecture = "Gemma4ForCausalLM";
  out.wrapper = "gemma4";
  out.wrapper_architecture = "Gemma4ForConditionalGeneration";
  out.read_layers = read_layers;
  return out;
}();

}  // namespace lm::families
