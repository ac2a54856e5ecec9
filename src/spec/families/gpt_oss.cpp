// gpt-oss (20B, 120B): windows in every second layer, attention sinks, and experts with biases and a clamped
// GLU in every layer. The weights of a token's experts are the softmax over their logits alone, which is that
// over all logits, divided by the sum of theirs.
#include <fmt/format.h>
#include <utility>

#include "spec/families/experts.h"

namespace lm::families {
namespace {

// Codes of MXFP4 share a scale along the input.
void check_codes(const ConfigReader& config, const ExpertsSpec& experts, const ModelSpec& spec) {
  if (spec.stored != EncodingKind::kMxfp4) return;
  for (const auto& [key, size] :
       {std::pair("hidden_size", spec.hidden), std::pair("intermediate_size", experts.ffn)})
    if (size % kMxBlock != 0)
      config.fail(key, fmt::format("= {} is not a multiple of {}, of which MXFP4 is made", size, kMxBlock));
}

// One tensor for each matrix of all experts, [experts, in, out], and one for its biases.
NameMap names() {
  const auto of_experts = [](const char* path, const char* ours) {
    return ModuleName{.path = path, .first = ours, .transposed = true, .weight = "", .bias = "_bias"};
  };
  NameMap names = with_modules(llama_names(), {{"self_attn.q_proj", "attn.q"},
                                               {"self_attn.k_proj", "attn.k"},
                                               {"self_attn.v_proj", "attn.v"},
                                               {"self_attn.o_proj", "attn.o"},
                                               {"mlp.router", "experts.router"},
                                               of_experts("mlp.experts.gate_up_proj.*", "experts.gate_up"),
                                               of_experts("mlp.experts.down_proj.*", "experts.down")});
  names.vectors = {{"attn.sinks", "self_attn.sinks"}};
  names.experts = "mlp.experts";
  return names;
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  const bool bias = config.boolean("attention_bias", true);
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    attention.qkv_bias = attention.out_bias = bias;
    attention.sinks = true;
  }
  read_pattern(config, read_window(config, 128), 2, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 128, .chosen = 4}, spec);
  experts.renormalise = experts.round_weights = true;
  experts.bias = experts.router_bias = true;
  experts.clamped = ClampedGlu{.alpha = config.positive("swiglu_alpha", 1.702),
                               .limit = config.positive("swiglu_limit", 7)};
  check_codes(config, experts, spec);
  put_experts(experts, spec);
}

void read_ropes(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  read_rope_or(config, family,
               {{"rope_type", "yarn"},
                {"factor", 32.0},
                {"beta_fast", 32.0},
                {"beta_slow", 1.0},
                {"truncate", false},
                {"original_max_position_embeddings", 4096}},
               spec);
}

}  // namespace

const Family gpt_oss = {.model_type = "gpt_oss",
                        .architecture = "GptOssForCausalLM",
                        .max_positions = 131072,
                        .kv_heads = 8,
                        .head_dim = 64,
                        .norm_eps = 1e-5,
                        .rope_theta = 1.5e5,
                        .norm = NormKind::kRmsLate,
                        .mxfp4 = true,
                        .names = names,
                        .read_layers = read_layers,
                        .read_ropes = read_ropes};

}  // namespace lm::families
