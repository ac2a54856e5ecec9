// Gemma 4: Gemma 3 with ordinary norm weights, normed values, layers without a window that have wider heads
// (and may take their keys for values), and a number that each layer's output is multiplied by. In the small
// sizes (E2B, E4B) each layer has an input of its own, and the last layers read the keys and values of
// earlier ones. In 26B-A4B experts stand beside each MLP: both have norms before and behind them, and what
// these give is added and normed once more.
#include <fmt/format.h>
#include <algorithm>
#include <charconv>

#include "spec/families/experts.h"
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

// The last layers read the keys and values of the last layer before them that is of their kind, and may have
// MLPs twice as wide.
void read_borrowed_keys(const ConfigReader& config, ModelSpec& spec) {
  constexpr const char* kKey = "num_kv_shared_layers";
  const int64_t layers = spec.layer_count(), borrowers = config.count(kKey, 0, kMostPositions);
  if (borrowers >= layers && borrowers > 0)
    config.fail(kKey, fmt::format("= {} leaves no layer with keys of its own", borrowers));
  const bool wide = config.boolean("use_double_wide_mlp", false);
  for (int64_t i = layers - borrowers; i < layers; ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    AttentionSpec& attention = layer.attention();
    int64_t source = layers - borrowers - 1;
    while (source >= 0 && (spec.layer(source).attention().window > 0) != (attention.window > 0)) --source;
    if (source < 0)
      config.fail(kKey, fmt::format("= {}: no earlier layer is of the kind of layer {}", borrowers, i));
    AttentionSpec& lender = spec.layers[static_cast<size_t>(source)].attention();
    if (lender.head_dim != attention.head_dim || lender.kv_heads != attention.kv_heads)
      config.fail(kKey, fmt::format("= {}: heads of layers {} and {} differ", borrowers, source, i));
    lender.lends = true;
    attention.source = source;
    attention.value_norm.reset();
    attention.values_are_keys = false;
    if (wide) layer.mlp().ffn *= 2;
  }
}

}  // namespace

NameMap gemma4_names() {
  NameMap names = four_norm_names();
  names.vectors = {{"scalar", "layer_scalar"}};
  names.input_table = "model.embed_tokens_per_layer";
  names.input_projection = "model.per_layer_model_projection";
  names.input_norm = "model.per_layer_projection_norm";
  return names;
}

void read_gemma4_layers(const ConfigReader& config, int64_t window, ModelSpec& spec) {
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
  read_borrowed_keys(config, spec);
  spec.head.logit_cap = read_cap(config, "final_logit_softcapping", 0);
}

void read_gemma4_ropes(const ConfigReader& config, const Family&, ModelSpec& spec) {
  read_rope_entries(config, assumed_ropes(), spec);
}

namespace {

void read_inputs(const ConfigReader& config, ModelSpec& spec) {
  constexpr const char *kWidth = "hidden_size_per_layer_input", *kVocab = "vocab_size_per_layer_input";
  constexpr int64_t kMostWidth = 1 << 16, kMostRows = 1 << 24;
  const int64_t width = config.is_null(kWidth) ? 0 : config.count(kWidth, 256, kMostWidth);
  if (width == 0) return;
  InputsSpec& inputs = spec.embedding.inputs;
  inputs = {.width = width,
            .layers = spec.layer_count(),
            .vocab = config.size(kVocab, 262144, kMostRows),
            .norm = spec.final_norm};
  if (inputs.vocab < spec.vocab)
    config.fail(kVocab, fmt::format("= {} is below vocab_size = {}", inputs.vocab, spec.vocab));
  for (LayerSpec& layer : spec.layers) {
    layer.sublayers.push_back({.norm = std::nullopt,
                               .mixer = LayerInputSpec{.activation = layer.mlp().activation, .width = width},
                               .norm_after = spec.final_norm});
  }
  NameMap& names = spec.names;
  names.norms.push_back({"input.norm_after", "post_per_layer_input_norm"});
  names.modules.push_back({"per_layer_input_gate", "input.gate"});
  names.modules.push_back({"per_layer_projection", "input.out"});
}

// One tensor for the first matrices of all experts, and one for the last ones.
void name_experts(NameMap& names) {
  for (NormName& norm : names.norms)
    if (norm.ours == std::string_view("mlp.norm_after")) norm.ours = "mlp.norm_joined";
  names.norms.insert(names.norms.end(), {{"mlp.norm_after", "post_feedforward_layernorm_1"},
                                         {"experts.input_norm", "pre_feedforward_layernorm_2"},
                                         {"experts.norm_after", "post_feedforward_layernorm_2"}});
  names.vectors.insert(names.vectors.end(), {{"experts.router_norm", "router.scale"},
                                             {"experts.factors", "router.per_expert_scale"}});
  names.modules.insert(
      names.modules.end(),
      {{"router.proj", "experts.router"},
       {.path = "experts.gate_up_proj.*", .first = "experts.gate", .last = "experts.up", .weight = ""},
       {.path = "experts.down_proj.*", .first = "experts.down", .weight = ""}});
  names.experts = "experts";
}

void read_experts_beside(const ConfigReader& config, ModelSpec& spec) {
  if (!config.boolean("enable_moe_block", false)) return;
  const NormSpec& norm = spec.final_norm;
  ExpertsSpec experts = read_experts(config, {.aux_loss = 0}, spec);
  experts.ffn = config.required_size("moe_intermediate_size", kMostExpertFfn);
  experts.renormalise = experts.factors = true;
  experts.input_norm = norm;
  experts.router_norm = {.kind = NormKind::kRms, .eps = norm.eps};
  for (LayerSpec& layer : spec.layers) {
    layer.sublayers.back().norm_joined = norm;
    layer.sublayers.push_back({.norm = {}, .mixer = experts, .norm_after = norm, .beside = true});
  }
  name_experts(spec.names);
}

constexpr KeyAlias kAliases[] = {{"num_experts_per_tok", "top_k_experts"}};

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_gemma4_layers(config, 512, spec);
  read_experts_beside(config, spec);
  read_inputs(config, spec);
}

}  // namespace

constinit const Family gemma4_text = [] {
  Family out = kGemma4;
  out.model_type = "gemma4_text";
  out.architecture = "Gemma4ForCausalLM";
  out.wrapper = "gemma4";
  out.wrapper_architecture = "Gemma4ForConditionalGeneration";
  out.aliases = kAliases;
  out.read_layers = read_layers;
  return out;
}();

}  // namespace lm::families
