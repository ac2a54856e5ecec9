// GLM-4-0414 and GLM-Z1: GLM with norms before and after each mixer.
#include "spec/families/glm.h"

namespace lm::families {
namespace {

NameMap names() {
  return with_norms(glm_names(), {{"attn.norm", "input_layernorm"},
                                  {"attn.norm_after", "post_self_attn_layernorm"},
                                  {"mlp.norm", "post_attention_layernorm"},
                                  {"mlp.norm_after", "post_mlp_layernorm"}});
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  add_norms_after(spec);
  read_glm_layers(config, spec);
}

}  // namespace

const Family glm4 = {.model_type = "glm4",
                     .architecture = "Glm4ForCausalLM",
                     .max_positions = 131072,
                     .kv_heads = 2,
                     .head_dim = 128,
                     .norm_eps = 1.5625e-7,
                     .rotated = 0.5,
                     .pad_token = 151329,
                     .neighbours = true,
                     .names = names,
                     .read_layers = read_layers};

}  // namespace lm::families
