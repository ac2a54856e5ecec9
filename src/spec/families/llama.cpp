// Llama 2 and 3, TinyLlama, SmolLM2 and the many that were stored as Llama.
#include "spec/families/family.h"

namespace lm {

NameMap llama_names() {
  using enum LinearPart;
  return {.embedding = "model.embed_tokens",
          .layers = "model.layers.",
          .attention_norm = "input_layernorm",
          .mlp_norm = "post_attention_layernorm",
          .q_norm = "self_attn.q_norm",
          .k_norm = "self_attn.k_norm",
          .modules = {{"self_attn.q_proj", kQ, kQ},
                      {"self_attn.k_proj", kK, kK},
                      {"self_attn.v_proj", kV, kV},
                      {"self_attn.o_proj", kOut, kOut},
                      {"mlp.gate_proj", kGate, kGate},
                      {"mlp.up_proj", kUp, kUp},
                      {"mlp.down_proj", kDown, kDown}},
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
                      .llama_cpp = {.name = "llama",
                                    .turns_neighbours = true,
                                    .qkv_bias = true,
                                    .other_bias = true,
                                    .llama3_rope = true},
                      .read_layers = read_layers};

}  // namespace families
}  // namespace lm
