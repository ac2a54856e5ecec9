// Arcee's AFM: Llama with an MLP of squared ReLUs without a gate.
#include "spec/families/family.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_attention_bias(config, spec);
  read_mlp_bias(config, spec);
  check_layer_types(config, spec);
}

}  // namespace

const Family arcee = {.model_type = "arcee",
                      .architecture = "ArceeForCausalLM",
                      .max_positions = 4096,
                      .norm_eps = 1e-5,
                      .gated = false,
                      .activations = kRelu2,
                      .read_layers = read_layers};

}  // namespace lm::families
