// Gemma 4 12B: the text model of Gemma 4 inside one that also sees and hears.
#include "spec/families/gemma.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_gemma4_layers(config, 1024, spec);
}

}  // namespace

const Family gemma4_unified_text = {
    .model_type = "gemma4_unified_text",
    .architecture = "Gemma4UnifiedForCausalLM",
    .wrapper = "gemma4_unified",
    .wrapper_architecture = "Gemma4UnifiedForConditionalGeneration",
    .sizes = {.hidden = 2304, .ffn = 9216, .layers = 30, .heads = 8, .vocab = 262144},
    .max_positions = 262144,
    .kv_heads = 4,
    .head_dim = 256,
    .tied = true,
    .pad_token = 0,
    .norm = NormKind::kRmsLate,
    .activation_key = "hidden_activation",
    .activations = kGeluTanh,
    .names = gemma4_names,
    .read_layers = read_layers,
    .read_ropes = read_gemma4_ropes};

}  // namespace lm::families
