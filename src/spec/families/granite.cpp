// Granite 3: Llama with four factors.
#include "spec/families/granite.h"

namespace lm::families {

void read_multipliers(const ConfigReader& config, ModelSpec& spec) {
  spec.embedding.scale = config.positive("embedding_multiplier", 1);
  spec.embedding.scales_prompt = true;
  spec.head.logit_scale = 1 / config.positive("logits_scaling", 1);
  const double residual = config.positive("residual_multiplier", 1);
  const double scores = config.positive("attention_multiplier", 1);
  for (LayerSpec& layer : spec.layers) {
    layer.attention().softmax_scale = scores;
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.residual_scale = residual;
  }
}

namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_attention_bias(config, spec);
  read_mlp_bias(config, spec);
  read_multipliers(config, spec);
  check_layer_types(config, spec);
}

}  // namespace

const Family granite = {.model_type = "granite",
                        .architecture = "GraniteForCausalLM",
                        .max_positions = 2048,
                        .read_layers = read_layers};

}  // namespace lm::families
