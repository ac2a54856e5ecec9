// Gemma 2: Gemma with norms before and after each mixer, soft caps, and windows in every second layer.
#include "spec/families/gemma.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  add_norms_after(spec);
  read_attention_bias(config, spec);
  scale_embedding(spec);
  read_query_scale(config, spec);
  read_pattern(config, read_window(config, 4096), 2, spec);
  const double cap = read_cap(config, "attn_logit_softcapping", 50);
  for (LayerSpec& layer : spec.layers) layer.attention().softcap = cap;
  spec.head.logit_cap = read_cap(config, "final_logit_softcapping", 30);
}

}  // namespace

const Family gemma2 = {.model_type = "gemma2",
                       .architecture = "Gemma2ForCausalLM",
                       .max_positions = 8192,
                       .kv_heads = 4,
                       .head_dim = 256,
                       .tied = true,
                       .pad_token = 0,
                       .norm = kGemmaNorm,
                       .activation_key = "hidden_activation",
                       .activations = kGeluTanh,
                       .names = four_norm_names,
                       .read_layers = read_layers};

}  // namespace lm::families
