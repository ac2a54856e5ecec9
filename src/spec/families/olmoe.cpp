// OLMoE: experts in every layer, and a norm of all heads of q and of k together.
#include "spec/families/experts.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  read_attention_bias(config, spec);
  if (config.find("clip_qkv")) config.fail("clip_qkv", "other than null is not supported");
  for (LayerSpec& layer : spec.layers) {
    layer.attention().head_norm = spec.final_norm;
    layer.attention().joint_norm = true;
  }
  check_layer_types(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 64, .chosen = 8, .aux_loss = 0.01}, spec);
  experts.renormalise = config.boolean("norm_topk_prob", false);
  experts.round_weights = true;
  put_experts(experts, spec);
}

}  // namespace

const Family olmoe = {.model_type = "olmoe",
                      .architecture = "OlmoeForCausalLM",
                      .max_positions = 4096,
                      .norm_eps = 1e-5,
                      .pad_token = 1,
                      .names = expert_names,
                      .class_names = stacked_names,
                      .read_layers = read_layers};

}  // namespace lm::families
