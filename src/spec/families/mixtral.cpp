// Mixtral: Mistral with experts in every layer, whose weights add up to 1 and stay fp32.
#include "spec/families/experts.h"

namespace lm::families {
namespace {

// The noise multiplies what experts and router read in training.
constexpr const char* kZero[] = {"attention_dropout", "router_jitter_noise"};

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "attention_bias");
  refuse_if_set(config, spec, "mlp_bias");
  const int64_t window = read_window(config, 0);
  for (LayerSpec& layer : spec.layers) layer.attention().window = window;
  check_layer_types(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 8, .chosen = 2}, spec);
  experts.renormalise = true;
  put_experts(experts, spec);
}

}  // namespace

const Family mixtral = {.model_type = "mixtral",
                        .architecture = "MixtralForCausalLM",
                        .max_positions = 131072,
                        .kv_heads = 8,
                        .norm_eps = 1e-5,
                        .rope_theta = 1e6,
                        .dropouts = kZero,
                        .names = mixtral_names,
                        .class_names = mixtral_class_names,
                        .read_layers = read_layers};

}  // namespace lm::families
