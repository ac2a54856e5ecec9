// Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with experts in place of the MLP, in all layers or in
// some, and beside them an expert that all tokens meet, with a gate of its own.
#include "spec/families/experts.h"

namespace lm::families {
namespace {

NameMap names() {
  NameMap names = expert_names();
  names.modules.insert(names.modules.end(), {{"mlp.shared_expert.gate_proj", "shared.gate"},
                                             {"mlp.shared_expert.up_proj", "shared.up"},
                                             {"mlp.shared_expert.down_proj", "shared.down"},
                                             {"mlp.shared_expert_gate", "shared.weight"}});
  return names;
}

// With use_sliding_window every second one of the first max_window_layers layers has the window; Qwen2 gives
// it to the last ones.
void read_windows(const ConfigReader& config, ModelSpec& spec) {
  const int64_t window = read_optional_window(config, 4096);
  const auto end = static_cast<size_t>(config.count("max_window_layers", 28, kMostPositions));
  for (size_t i = 0; i < spec.layers.size() && i < end; i += 2) spec.layers[i].attention().window = window;
  read_layer_types(config, window, spec);
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  set_qkv_bias(spec, config.boolean("qkv_bias", true));
  read_windows(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 60, .chosen = 4, .ffn = 1408}, spec);
  experts.renormalise = config.boolean("norm_topk_prob", false);
  experts.round_weights = true;
  const SharedExpertSpec shared{.activation = experts.activation,
                                .ffn = config.size("shared_expert_intermediate_size", 5632, kMostExpertFfn),
                                .gated = true};
  put_some_experts(config, experts, spec);
  put_shared_expert(shared, spec);
}

}  // namespace

const Family qwen2_moe = {.model_type = "qwen2_moe",
                          .architecture = "Qwen2MoeForCausalLM",
                          .max_positions = 32768,
                          .kv_heads = 16,
                          .names = names,
                          .class_names = stacked_names,
                          .read_layers = read_layers};

}  // namespace lm::families
