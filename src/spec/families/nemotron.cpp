// Nemotron 3 and 4, Minitron: LayerNorms whose weights are offsets from 1, an MLP of squared ReLUs without a
// gate, heads that are turned by half.
#include "spec/families/family.h"

namespace lm::families {
namespace {

constexpr KeyAlias kAliases[] = {{"rms_norm_eps", "norm_eps"}};

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_attention_bias(config, spec);
  read_mlp_bias(config, spec);
  check_layer_types(config, spec);
}

}  // namespace

const Family nemotron = {.model_type = "nemotron",
                         .architecture = "NemotronForCausalLM",
                         .aliases = kAliases,
                         .max_positions = 4096,
                         .norm_eps = 1e-5,
                         .rotated = 0.5,
                         .norm = NormKind::kLayerOffset,
                         .gated = false,
                         .activations = kRelu2,
                         .read_layers = read_layers};

}  // namespace lm::families
