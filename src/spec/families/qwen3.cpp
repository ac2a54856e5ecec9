// Qwen3: q and k are normed head by head; the last layers may have a window.
#include "spec/families/family.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  read_attention_bias(config, spec);
  for (LayerSpec& layer : spec.layers) layer.attention().head_norm = spec.final_norm;
  read_last_windows(config, spec);
}

}  // namespace

const Family qwen3 = {.model_type = "qwen3",
                      .architecture = "Qwen3ForCausalLM",
                      .max_positions = 32768,
                      .kv_heads = 32,
                      .head_dim = 128,
                      .read_layers = read_layers};

}  // namespace lm::families
