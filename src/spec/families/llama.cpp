// Llama 2 and 3, TinyLlama, SmolLM2 and the many that were stored as Llama.
#include "spec/families/family.h"

namespace lm {

NameMap llama_names() {
  return {.embedding = "model.embed_tokens",
          .layers = "model.layers.",
          .norms = {{"attn.norm", "input_layernorm"},
                    {"mlp.norm", "post_attention_layernorm"},
                    {"attn.q_norm", "self_attn.q_norm"},
                    {"attn.k_norm", "self_attn.k_norm"}},
          .modules = {{"self_attn.q_proj", "attn.q"},
                      {"self_attn.k_proj", "attn.k"},
                      {"self_attn.v_proj", "attn.v"},
                      {"self_attn.o_proj", "attn.o"},
                      {"mlp.gate_proj", "mlp.gate"},
                      {"mlp.up_proj", "mlp.up"},
                      {"mlp.down_proj", "mlp.down"}},
          .norm = "model.norm",
          .head = "lm_head"};
}

namespace families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_attention_bias(config, spec);
  read_mlp_bias(config, spec);
  check_layer_types(config, spec);
}

}  // namespace

const Family llama = {.model_type = "llama",
                      .architecture = "LlamaForCausalLM",
                      .max_positions = 2048,
                      .read_layers = read_layers};

}  // namespace families
}  // namespace lm
