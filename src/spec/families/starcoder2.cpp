// StarCoder2: LayerNorms, an MLP without a gate, biases everywhere; all layers have one window or none.
#include "spec/families/family.h"

namespace lm::families {
namespace {

constexpr KeyAlias kAliases[] = {{"rms_norm_eps", "norm_epsilon"}};

NameMap names() {
  return with_modules(llama_names(), {{"self_attn.q_proj", "attn.q"},
                                      {"self_attn.k_proj", "attn.k"},
                                      {"self_attn.v_proj", "attn.v"},
                                      {"self_attn.o_proj", "attn.o"},
                                      {"mlp.c_fc", "mlp.up"},
                                      {"mlp.c_proj", "mlp.down"}});
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  const bool bias = config.boolean("use_bias", true);
  const int64_t window = read_window(config, 0);
  set_mlp_bias(spec, bias);
  for (LayerSpec& layer : spec.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().window = window;
  }
  check_layer_types(config, spec);
}

}  // namespace

const Family starcoder2 = {.model_type = "starcoder2",
                           .architecture = "Starcoder2ForCausalLM",
                           .aliases = kAliases,
                           .max_positions = 4096,
                           .kv_heads = 2,
                           .norm_eps = 1e-5,
                           .tied = true,
                           .norm = NormKind::kLayer,
                           .gated = false,
                           .activations = kGeluTanh,
                           .embedding_dropout = {"embedding_dropout"},
                           .residual_dropout = {"residual_dropout"},
                           .left_out = {"attention_dropout"},
                           .dropouts = {},
                           .names = names,
                           .read_layers = read_layers};

}  // namespace lm::families
