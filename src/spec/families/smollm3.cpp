// SmolLM3: Llama with layers that know no positions, every fourth one if the file does not list them.
#include "spec/families/family.h"

#include <fmt/format.h>

namespace lm::families {
namespace {

// no_rope_layers: 1 for a layer that uses RoPE, 0 for one that does not; a longer list is cut, as the
// reference does.
void read_rope_layers(const ConfigReader& config, ModelSpec& spec) {
  const int64_t interval = config.size("no_rope_layer_interval", 4, kMostPositions);
  const Json* list = config.find("no_rope_layers");
  if (list && (!list->is_array() || list->size() < spec.layers.size())) {
    config.fail("no_rope_layers",
                fmt::format("must be a list with one entry for each of the {} layers", spec.layers.size()));
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    bool rotates = (static_cast<int64_t>(i) + 1) % interval != 0;
    if (list) {
      const Json& entry = (*list)[i];
      rotates = entry == 1;
      if (!entry.is_number_integer() || (entry != 0 && entry != 1)) {
        config.fail("no_rope_layers", fmt::format("entry {} must be 0 or 1", i));
      }
    }
    spec.layers[i].attention().rope = rotates ? 0 : AttentionSpec::kNoRope;
  }
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_attention_bias(config, spec);
  read_mlp_bias(config, spec);
  read_rope_layers(config, spec);
  const int64_t window = read_optional_window(config, 0);
  for (LayerSpec& layer : spec.layers) layer.attention().window = layer.attention().rotates() ? 0 : window;
  read_layer_types(config, window, spec);
}

}  // namespace

const Family smollm3 = {.model_type = "smollm3",
                        .architecture = "SmolLM3ForCausalLM",
                        .max_positions = 32768,
                        .kv_heads = 4,
                        .rope_theta = 2e6,
                        .tied = true,
                        .pad_token = 128004,
                        .read_layers = read_layers};

}  // namespace lm::families
