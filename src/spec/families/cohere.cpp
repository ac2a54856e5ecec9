// Command R and R+: attention and MLP read the same LayerNorm without biases; the logits have a factor. R+
// norms each head of q and k, with weights of its own.
#include "spec/families/cohere.h"

namespace lm::families {

void read_cohere_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  put_beside(spec);
  read_attention_bias(config, spec);
  spec.head.logit_scale = config.positive("logit_scale", 0.0625);
}

namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_cohere_layers(config, spec);
  if (config.boolean("use_qk_norm", false)) {
    for (LayerSpec& layer : spec.layers) {
      layer.attention().head_norm = spec.final_norm;
      layer.attention().own_norms = true;
    }
  }
  check_layer_types(config, spec);
}

}  // namespace

const Family cohere = {.model_type = "cohere",
                       .architecture = "CohereForCausalLM",
                       .aliases = kCohereAliases,
                       .max_positions = 8192,
                       .norm_eps = 1e-5,
                       .rope_theta = 5e5,
                       .tied = true,
                       .pad_token = 0,
                       .norm = NormKind::kLayerNoBias,
                       .neighbours = true,
                       .read_layers = read_layers};

}  // namespace lm::families
