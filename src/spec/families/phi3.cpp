// Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with q, k and v joined in the files, as gate and up are; long
// texts by longrope.
#include "spec/families/family.h"

namespace lm::families {
namespace {

constexpr const char* kDropouts[] = {"attention_dropout", "resid_pdrop", "embd_pdrop"};

NameMap names() {
  return with_modules(llama_names(), {{"self_attn.qkv_proj", "attn.q", "attn.v"},
                                      {"self_attn.o_proj", "attn.o"},
                                      {"mlp.gate_up_proj", "mlp.gate", "mlp.up"},
                                      {"mlp.down_proj", "mlp.down"}});
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  for (const char* key : {"attention_bias", "mlp_bias", "lm_head_bias"}) refuse_if_set(config, spec, key);
  const int64_t window = read_window(config, 0);
  for (LayerSpec& layer : spec.layers) layer.attention().window = window;
  check_layer_types(config, spec);
}

}  // namespace

const Family phi3 = {.model_type = "phi3",
                     .architecture = "Phi3ForCausalLM",
                     .max_positions = 4096,
                     .original_positions = 4096,
                     .norm_eps = 1e-5,
                     .rotated = 1,
                     .pad_token = 32000,
                     .old_longrope = true,
                     .dropouts = kDropouts,
                     .names = names,
                     .read_layers = read_layers};

}  // namespace lm::families
