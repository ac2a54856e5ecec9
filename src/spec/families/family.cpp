#include "spec/families/family.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <string_view>
#include <utility>

namespace lm {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 22;

constexpr const Family* kFamilies[] = {
#define LM_FAMILY(name) &families::name,
#include "spec/families/table.inc"
#undef LM_FAMILY
};

// Known families and what this program lacks for them; the rest is "unknown".
constexpr std::pair<const char*, const char*> kNotYet[] = {
    {"apertus", "the activation xIELU"},
    {"bloom", "ALiBi"},
    {"deepseek_v2", "latent attention and groups of experts"},
    {"deepseek_v3", "latent attention and groups of experts"},
    {"falcon", "its layout of q, k and v"},
    {"falcon_h1", "Mamba layers"},
    {"gemma3n", "several residual streams"},
    {"glm4_moe_lite", "latent attention and shared experts"},
    {"gpt_neox", "its layout of q, k and v"},
    {"granite_swa", "attention sinks"},
    {"granitemoe", "its files of experts"},
    {"hunyuan_v1_dense", "norms of q and k after RoPE"},
    {"llama4", "shared experts and interleaved RoPE"},
    {"llama4_text", "shared experts and interleaved RoPE"},
    {"mamba", "state-space layers"},
    {"ministral", "windows in some layers only"},
    {"nemotron_h", "Mamba layers"},
    {"olmo", "LayerNorms without weights"},
    {"phi", "a bias of the head"},
    {"phimoe", "a router that draws at random"},
    {"qwen2_moe", "shared experts"},
    {"qwen3_5", "Gated DeltaNet layers"},
    {"qwen3_5_moe", "Gated DeltaNet layers and shared experts"},
    {"qwen3_next", "Gated DeltaNet layers"},
    {"seed_oss", "its own keys of biases and dropouts"},
    {"t5", "encoder and decoder"}};

// The kind of each layer as layer_types has it: whether it slides.
template <typename Use>
void for_each_type(const ConfigReader& config, const ModelSpec& spec, Use&& use) {
  const Json* types = config.find("layer_types");
  if (!types) return;
  if (!types->is_array() || types->size() != spec.layers.size()) {
    config.fail("layer_types",
                fmt::format("must be a list with one entry for each of the {} layers", spec.layers.size()));
  }
  for (size_t i = 0; i < types->size(); ++i) {
    const Json& type = (*types)[i];
    const bool slides = type == "sliding_attention";
    const std::string entry = fmt::format("entry {} = {}", i, type.dump(-1, ' ', true).substr(0, 100));
    // "attention" is the old word for it.
    if (!slides && type != "full_attention" && type != "attention")
      config.fail("layer_types", entry + " is not supported");
    use(i, slides, entry);
  }
}

}  // namespace

FoundFamily find_family(const Json& root, const ConfigReader& file) {
  constexpr const char* kText = "text_config";
  const std::string type = file.text("model_type").value_or("");
  if (type.empty()) file.fail("model_type", "is missing: the model's family is unknown");
  const Family* inside = nullptr;  // of a file that holds the model inside another one
  std::vector<std::string> supported;
  for (const Family* family : kFamilies) {
    if (type == family->model_type) return {*family, ConfigReader(root, file.place(), "", family->aliases)};
    supported.emplace_back(family->model_type);
    if (family->wrapper == nullptr) continue;
    if (std::ranges::find(supported, family->wrapper) == supported.end())
      supported.emplace_back(family->wrapper);
    if (inside == nullptr && type == family->wrapper) inside = family;
  }
  if (inside != nullptr) {
    // Without a model_type it is the first in the table.
    const std::string text = file.inside(kText).text("model_type").value_or(inside->model_type);
    for (const Family* family : kFamilies) {
      if (text != family->model_type || family->wrapper == nullptr || type != family->wrapper) continue;
      return {*family,
              ConfigReader(*file.find(kText), file.place(), std::string(kText) + ".", family->aliases), true};
    }
    file.inside(kText).fail("model_type", "= \"" + text.substr(0, 100) + "\" is not supported in " + type);
  }
  const std::string list = fmt::format(" (supported: {})", fmt::join(supported, ", "));
  for (const auto& [name, lacking] : kNotYet) {
    if (type == name)
      file.fail("model_type", "= \"" + type + "\" is not supported yet: it needs " + lacking + list);
  }
  file.fail("model_type", "= \"" + type.substr(0, 100) + "\" is not an architecture known here" + list);
}

NameMap with_norms(NameMap names, std::vector<NormName> norms) {
  for (const NormName& norm : names.norms) {
    const std::string_view ours = norm.ours;
    if (ours == "attn.q_norm" || ours == "attn.k_norm") norms.push_back(norm);
  }
  names.norms = std::move(norms);
  return names;
}

NameMap with_modules(NameMap names, std::vector<ModuleName> modules) {
  names.modules = std::move(modules);
  return names;
}

NameMap four_norm_names() {
  return with_norms(llama_names(), {{"attn.norm", "input_layernorm"},
                                    {"attn.norm_after", "post_attention_layernorm"},
                                    {"mlp.norm", "pre_feedforward_layernorm"},
                                    {"mlp.norm_after", "post_feedforward_layernorm"}});
}

NameMap norms_after_names() {
  return with_norms(llama_names(), {{"attn.norm_after", "post_attention_layernorm"},
                                    {"mlp.norm_after", "post_feedforward_layernorm"}});
}

void add_norms_after(ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers)
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.norm_after = spec.final_norm;
}

void move_norms_after(ModelSpec& spec) {
  add_norms_after(spec);
  for (LayerSpec& layer : spec.layers)
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.norm.reset();
}

void put_beside(ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers) {
    layer.sublayers.back().norm.reset();
    layer.sublayers.back().beside = true;
  }
}

void set_qkv_bias(ModelSpec& spec, bool bias) {
  for (LayerSpec& layer : spec.layers) layer.attention().qkv_bias = bias;
}

void set_mlp_bias(ModelSpec& spec, bool bias) {
  for (LayerSpec& layer : spec.layers) {
    for (SublayerSpec& sublayer : layer.sublayers) {
      if (auto* const gated = std::get_if<GatedMlpSpec>(&sublayer.mixer)) gated->bias = bias;
      if (auto* const plain = std::get_if<PlainMlpSpec>(&sublayer.mixer)) plain->bias = bias;
    }
  }
}

void check_heads(const ConfigReader& config, const AttentionSpec& attention) {
  if (attention.heads % attention.kv_heads != 0) {
    config.fail("num_key_value_heads", fmt::format("= {} does not divide num_attention_heads = {}",
                                                   attention.kv_heads, attention.heads));
  }
  if (attention.head_dim % 2 != 0)
    config.fail("head_dim", fmt::format("= {} is odd: RoPE turns pairs of features", attention.head_dim));
  if (attention.q_rows() > kMostRows) {
    config.fail("head_dim",
                fmt::format("× num_attention_heads = {} is more than {}", attention.q_rows(), kMostRows));
  }
}

void read_attention_bias(const ConfigReader& config, ModelSpec& spec) {
  const bool bias = config.boolean("attention_bias", false);
  for (LayerSpec& layer : spec.layers) layer.attention().qkv_bias = layer.attention().out_bias = bias;
}

void read_mlp_bias(const ConfigReader& config, ModelSpec& spec) {
  set_mlp_bias(spec, config.boolean("mlp_bias", false));
}

void refuse_if_set(const ConfigReader& config, const ModelSpec& spec, const char* key) {
  if (config.boolean(key, false)) {
    config.fail(key,
                "= true is not supported for " + spec.model_type + ": the architecture has no such biases");
  }
}

double read_cap(const ConfigReader& config, const char* key, double missing) {
  if (config.is_null(key) || (missing == 0 && !config.find(key))) return 0;
  return config.positive(key, missing);
}

int64_t read_window(const ConfigReader& config, int64_t missing) {
  constexpr const char* kKey = "sliding_window";
  if (config.is_null(kKey) || (missing == 0 && !config.find(kKey))) return 0;
  return config.size(kKey, missing, kMostPositions);
}

int64_t read_optional_window(const ConfigReader& config, int64_t missing) {
  if (!config.boolean("use_sliding_window", false) || config.is_null("sliding_window")) return 0;
  return config.size("sliding_window", missing, kMostPositions);
}

void read_layer_types(const ConfigReader& config, int64_t window, ModelSpec& spec) {
  for_each_type(config, spec, [&](size_t i, bool slides, const std::string& entry) {
    if (slides && window == 0) {
      config.fail("layer_types", entry + ", but no window: use_sliding_window or sliding_window is not set");
    }
    spec.layers[i].attention().window = slides ? window : 0;
  });
}

void read_pattern(const ConfigReader& config, int64_t window, int64_t pattern, ModelSpec& spec) {
  for (size_t i = 0; i < spec.layers.size() && !config.find("layer_types"); ++i) {
    const bool slides = (static_cast<int64_t>(i) + 1) % pattern != 0;
    if (slides && window == 0) config.fail("sliding_window", "is null, but layers have a window");
    AttentionSpec& attention = spec.layers[i].attention();
    attention.window = slides ? window : 0;
  }
  read_layer_types(config, window, spec);
}

void read_last_windows(const ConfigReader& config, ModelSpec& spec) {
  const int64_t window = read_optional_window(config, 4096);
  const auto first = static_cast<size_t>(config.count("max_window_layers", 28, kMostPositions));
  for (size_t i = first; i < spec.layers.size(); ++i) spec.layers[i].attention().window = window;
  read_layer_types(config, window, spec);
}

void check_layer_types(const ConfigReader& config, const ModelSpec& spec) {
  // The reference ignores the list, which would be another model.
  for_each_type(config, spec, [&](size_t i, bool slides, const std::string& entry) {
    if (slides != (spec.layers[i].attention().window > 0)) {
      config.fail("layer_types",
                  entry + " contradicts the family: all layers of " + spec.model_type + " are alike");
    }
  });
}

}  // namespace lm
