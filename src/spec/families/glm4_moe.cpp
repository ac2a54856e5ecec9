// GLM-4.5 and later (355B-A32B, Air 106B-A12B): a dense MLP in the first layers, and in the others experts
// that a router of sigmoid scores chooses, in groups where the file has some, beside one that all tokens
// meet. Heads are turned by half, as halves; q and k may have norms. The files end with layers that predict
// further tokens, which transformers does not load either.
#include "spec/families/experts.h"

namespace lm::families {
namespace {

// num_local_experts, where there is one, says the same.
constexpr KeyAlias kAliases[] = {{"num_experts", "n_routed_experts"}};
constexpr int64_t kMostPredictors = 64, kMostShared = 64;

NameMap names() {
  NameMap names = expert_names();
  names.modules.insert(names.modules.end(), {{"mlp.shared_experts.gate_proj", "shared.gate"},
                                             {"mlp.shared_experts.up_proj", "shared.up"},
                                             {"mlp.shared_experts.down_proj", "shared.down"}});
  names.vectors = {{"experts.correction", "mlp.gate.e_score_correction_bias"}};
  return names;
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  set_qkv_bias(spec, config.boolean("attention_bias", false));
  if (config.boolean("use_qk_norm", false))
    for (LayerSpec& layer : spec.layers) layer.attention().head_norm = spec.final_norm;
  check_layer_types(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 128, .chosen = 8, .ffn = 1408, .aux_loss = 0}, spec);
  experts.renormalise = config.boolean("norm_topk_prob", true);
  experts.wide_logits = true;
  read_sigmoid_scores(config, experts);
  const SharedExpertSpec shared{.activation = experts.activation,
                                .ffn = experts.ffn * config.size("n_shared_experts", 1, kMostShared)};
  put_experts(experts, spec, config.count("first_k_dense_replace", 1, kMostPositions));
  put_shared_expert(shared, spec);
  const char* const key = config.find("num_mtp_layers") ? "num_mtp_layers" : "num_nextn_predict_layers";
  spec.predictors = config.count(key, 1, kMostPredictors);
}

}  // namespace

const Family glm4_moe = {.model_type = "glm4_moe",
                         .architecture = "Glm4MoeForCausalLM",
                         .aliases = kAliases,
                         .max_positions = 131072,
                         .kv_heads = 8,
                         .norm_eps = 1e-5,
                         .rotated = 0.5,
                         .names = names,
                         .class_names = stacked_names,
                         .read_layers = read_layers};

}  // namespace lm::families
