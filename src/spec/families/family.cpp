#include "spec/families/family.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

namespace lm {

namespace {

constexpr const Family* kFamilies[] = {
#define LM_FAMILY(name) &families::name,
#include "spec/families/table.inc"
#undef LM_FAMILY
};

// Known families and what this program lacks for them; the rest is "unknown".
constexpr std::pair<const char*, const char*> kNotYet[] = {
    {"gemma", "(1 + w) norms, GeGLU and scaled embeddings"},
    {"gemma2", "(1 + w) norms, soft caps and four norms per block"},
    {"gemma3", "(1 + w) norms and two RoPE tables"},
    {"gemma3_text", "(1 + w) norms and two RoPE tables"},
    {"phi", "LayerNorm and partial RoPE"},
    {"phi3", "fused projections and longrope scaling"},
    {"gpt2", "LayerNorm, learned positions and transposed weights"},
    {"gpt_neox", "LayerNorm and parallel blocks"},
    {"gpt_oss", "experts and attention sinks"},
    {"mixtral", "experts"},
    {"qwen2_moe", "experts"},
    {"qwen3_moe", "experts"},
    {"qwen3_next", "Gated DeltaNet layers"},
    {"qwen3_5", "Gated DeltaNet layers"},
    {"deepseek_v2", "latent attention and experts"},
    {"deepseek_v3", "latent attention and experts"},
    {"llama4", "experts and interleaved RoPE"},
    {"llama4_text", "experts and interleaved RoPE"},
    {"ministral", "windows in some layers only"},
    {"mistral3", "a vision tower"},
    {"olmo", "norms without weights"},
    {"olmo2", "norms after the layers"},
    {"glm", "interleaved partial RoPE"},
    {"glm4", "interleaved partial RoPE"},
    {"granite", "scaled residuals and logits"},
    {"cohere", "parallel blocks and scaled logits"},
    {"cohere2", "parallel blocks and scaled logits"},
    {"falcon", "LayerNorm and parallel blocks"},
    {"bloom", "ALiBi and LayerNorm"},
    {"mamba", "state-space layers"},
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
    if (!slides && type != "full_attention") config.fail("layer_types", entry + " is not supported");
    use(i, slides, entry);
  }
}

}  // namespace

const Family& find_family(const ConfigReader& config) {
  const std::string type = config.text("model_type").value_or("");
  if (type.empty()) config.fail("model_type", "is missing: the model's family is unknown");
  std::string supported;
  for (const Family* family : kFamilies) {
    if (type == family->model_type) return *family;
    supported += (supported.empty() ? " (supported: " : ", ") + std::string(family->model_type);
  }
  supported += ")";
  for (const auto& [name, lacking] : kNotYet) {
    if (type == name) {
      config.fail("model_type", "= \"" + type + "\" is not supported yet: it needs " + lacking + supported);
    }
  }
  config.fail("model_type",
              "= \"" + type.substr(0, 100) + "\" is not an architecture known here" + supported);
}

const Family* family_of(const ModelSpec& spec) {
  for (const Family* family : kFamilies) {
    if (spec.model_type == family->model_type) return family;
  }
  return nullptr;
}

void read_attention_bias(const ConfigReader& config, ModelSpec& spec) {
  const bool bias = config.boolean("attention_bias", false);
  for (LayerSpec& layer : spec.layers) layer.attention().qkv_bias = layer.attention().out_bias = bias;
}

void read_mlp_bias(const ConfigReader& config, ModelSpec& spec) {
  const bool bias = config.boolean("mlp_bias", false);
  for (LayerSpec& layer : spec.layers) layer.mlp().bias = bias;
}

void refuse_if_set(const ConfigReader& config, const ModelSpec& spec, const char* key) {
  if (config.boolean(key, false)) {
    config.fail(key,
                "= true is not supported for " + spec.model_type + ": the architecture has no such biases");
  }
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
