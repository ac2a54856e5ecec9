// EXAONE 4: norms after the mixers alone, and of each head of q and k. Where some layers have a window, the
// others know no positions.
#include "spec/families/family.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "attention_bias");
  refuse_if_set(config, spec, "mlp_bias");
  move_norms_after(spec);
  const int64_t window = read_window(config, 4096);
  // Newer files list the layers; the pattern may be a text there.
  if (window == 0 || config.find("layer_types")) {
    read_layer_types(config, window, spec);
  } else {
    read_pattern(config, window, config.size("sliding_window_pattern", 4, kMostPositions), spec);
  }
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    attention.head_norm = spec.final_norm;
    if (window > 0 && attention.window == 0) attention.rope = AttentionSpec::kNoRope;
  }
}

}  // namespace

const Family exaone4 = {.model_type = "exaone4",
                        .architecture = "Exaone4ForCausalLM",
                        .max_positions = 2048,
                        .kv_heads = 32,
                        .norm_eps = 1e-5,
                        .names = norms_after_names,
                        .read_layers = read_layers};

}  // namespace lm::families
