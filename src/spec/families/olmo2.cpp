// OLMo 2: Llama with norms after the mixers instead of before them, and of q and k.
#include "spec/families/olmo.h"

namespace lm::families {

void read_olmo_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  move_norms_after(spec);
  read_attention_bias(config, spec);
  for (LayerSpec& layer : spec.layers) {
    layer.attention().head_norm = spec.final_norm;
    layer.attention().joint_norm = true;
  }
}

namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_olmo_layers(config, spec);
  check_layer_types(config, spec);
}

}  // namespace

const Family olmo2 = {.model_type = "olmo2",
                      .architecture = "Olmo2ForCausalLM",
                      .max_positions = 2048,
                      .norm_eps = 1e-5,
                      .pad_token = 1,
                      .norm = NormKind::kRmsLate,
                      .names = norms_after_names,
                      .read_layers = read_layers};

}  // namespace lm::families
