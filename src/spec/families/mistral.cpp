// Mistral 7B, Nemo, Ministral: Llama without biases, all layers with one window or none.
#include "spec/families/family.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "attention_bias");
  refuse_if_set(config, spec, "mlp_bias");
  const int64_t window =
      config.is_null("sliding_window") ? 0 : config.size("sliding_window", 4096, kMostPositions);
  for (LayerSpec& layer : spec.layers) layer.attention().window = window;
  check_layer_types(config, spec);
}

}  // namespace

const Family mistral = {.model_type = "mistral",
                        .architecture = "MistralForCausalLM",
                        .max_positions = 131072,
                        .kv_heads = 8,
                        .read_layers = read_layers};

}  // namespace lm::families
