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

constinit const Family glm4 = [] {
  Family out = kGlm;
  out.model_type = "glm4";
  out.architecture = "Glm4ForCausalLM";
  out.names = names;
  out.read_layers = read_layers;
  return out;
}();

}  // namespace lm::families
