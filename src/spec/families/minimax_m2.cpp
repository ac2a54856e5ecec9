// MiniMax-M2: experts in every layer under Mixtral's names, chosen by sigmoid scores; a norm of all heads of
// q and of k together, and heads that are turned in part, as halves.
#include "spec/families/experts.h"

namespace lm::families {
namespace {

// The noise multiplies what experts and router read in training.
constexpr const char* kZero[] = {"attention_dropout", "router_jitter_noise"};
constexpr int64_t kMostPredictors = 64;

NameMap names() {
  NameMap names = mixtral_names();
  names.vectors = {{"experts.correction", "block_sparse_moe.e_score_correction_bias"}};
  return names;
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "attention_bias");
  refuse_if_set(config, spec, "mlp_bias");
  for (LayerSpec& layer : spec.layers) {
    layer.attention().head_norm = spec.final_norm;
    layer.attention().joint_norm = true;
  }
  check_layer_types(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 256, .chosen = 8}, spec);
  experts.renormalise = true;
  experts.scores = RouterScores::kSigmoid;
  put_experts(experts, spec);
  spec.predictors = config.count("num_mtp_modules", 0, kMostPredictors);
}

// Published files say how many features are turned, and not which part of them.
void read_ropes(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  Family turned = family;
  const int64_t head_dim = spec.layers.front().attention().head_dim;
  if (config.find("rotary_dim"))
    turned.rotated =
        static_cast<double>(config.size("rotary_dim", head_dim, head_dim)) / static_cast<double>(head_dim);
  read_rope(config, turned, spec);
}

}  // namespace

const Family minimax_m2 = {.model_type = "minimax_m2",
                           .architecture = "MiniMaxM2ForCausalLM",
                           .max_positions = 196608,
                           .kv_heads = 8,
                           .head_dim = 128,
                           .rope_theta = 5e6,
                           .rotated = 1,
                           .dropouts = kZero,
                           .names = names,
                           .class_names = mixtral_class_names,
                           .read_layers = read_layers,
                           .read_ropes = read_ropes};

}  // namespace lm::families
