// Qwen2 and Qwen2.5: biases on q, k and v; the last layers may have a window.
#include "spec/families/family.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  for (LayerSpec& layer : spec.layers) layer.attention().qkv_bias = true;
  read_last_windows(config, spec);
}

}  // namespace

const Family qwen2 = {.model_type = "qwen2",
                      .architecture = "Qwen2ForCausalLM",
                      .max_positions = 32768,
                      .kv_heads = 32,
                      .read_layers = read_layers};

}  // namespace lm::families
