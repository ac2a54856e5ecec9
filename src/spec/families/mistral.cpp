// Mistral 7B, Nemo, Small, Ministral 8B: Llama without biases, all layers with one window or none. Small 3.1
// and newer ones stand inside a model that sees images.
#include "spec/families/family.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "attention_bias");
  refuse_if_set(config, spec, "mlp_bias");
  const int64_t window = read_window(config, 4096);
  for (LayerSpec& layer : spec.layers) layer.attention().window = window;
  check_layer_types(config, spec);
}

}  // namespace

const Family mistral = {.model_type = "mistral",
                        .architecture = "MistralForCausalLM",
                        .wrapper = "mistral3",
                        .wrapper_architecture = "Mistral3ForConditionalGeneration",
                        .sizes = {.hidden = 4096, .ffn = 14336, .layers = 32, .heads = 32, .vocab = 32000},
                        .max_positions = 131072,
                        .kv_heads = 8,
                        .read_layers = read_layers};

}  // namespace lm::families
