// Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3 with experts in place of the MLP, in all layers or in some;
// all layers have one window or none.
#include "spec/families/experts.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  read_attention_bias(config, spec);
  const int64_t window = read_optional_window(config, 4096);
  for (LayerSpec& layer : spec.layers) {
    layer.attention().head_norm = spec.final_norm;
    layer.attention().window = window;
  }
  check_layer_types(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 128, .chosen = 8, .ffn = 768}, spec);
  experts.renormalise = config.boolean("norm_topk_prob", false);
  experts.round_weights = true;
  put_some_experts(config, experts, spec);
}

}  // namespace

const Family qwen3_moe = {.model_type = "qwen3_moe",
                          .architecture = "Qwen3MoeForCausalLM",
                          .max_positions = 32768,
                          .kv_heads = 4,
                          .names = expert_names,
                          .class_names = stacked_names,
                          .read_layers = read_layers};

}  // namespace lm::families
