// GLM-4 (glm-4-9b-hf, GLM-Edge): Llama whose heads are turned by half, in neighbouring pairs.
#include "spec/families/glm.h"

namespace lm::families {

NameMap glm_names() {
  return with_modules(llama_names(), {{"self_attn.q_proj", "attn.q"},
                                      {"self_attn.k_proj", "attn.k"},
                                      {"self_attn.v_proj", "attn.v"},
                                      {"self_attn.o_proj", "attn.o"},
                                      {"mlp.gate_up_proj", "mlp.gate", "mlp.up"},
                                      {"mlp.down_proj", "mlp.down"}});
}

void read_glm_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  set_qkv_bias(spec, config.boolean("attention_bias", true));
  check_layer_types(config, spec);
}

const Family glm = kGlm;

}  // namespace lm::families
