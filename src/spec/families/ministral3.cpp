// Ministral 3: Mistral with yarn, whose queries grow with the logarithm of their position in long texts.
#include "spec/families/family.h"

namespace lm::families {
namespace {

// What the class assumes.
const Json& assumed_rope() {
  static const Json table = {{"rope_type", "yarn"},
                             {"rope_theta", 1e6},
                             {"factor", 16.0},
                             {"original_max_position_embeddings", 16384},
                             {"beta_fast", 32.0},
                             {"beta_slow", 1.0},
                             {"mscale_all_dim", 1.0},
                             {"mscale", 1.0},
                             {"llama_4_scaling_beta", 0.1}};
  return table;
}

void read_ropes(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  read_rope_or(config, family, assumed_rope(), spec);
  // The table that was read.
  const Json* const scaling = config.find("rope_scaling");
  const bool old = scaling && scaling->is_object() && !scaling->empty();
  const char* const key = old ? "rope_scaling" : "rope_parameters";
  const ConfigReader table = config.inside(key, config.find(key) ? *config.find(key) : assumed_rope());
  const double slope = table.required_number("llama_4_scaling_beta");
  if (!(slope >= 0) || slope > 1e6) table.fail("llama_4_scaling_beta", "must be in [0, 1e6]");
  const RopeSpec& rope = spec.ropes.front();
  switch (rope.scaling) {
    case RopeSpec::Scaling::kYarn:
    case RopeSpec::Scaling::kLlama3:
    case RopeSpec::Scaling::kLongRope:
      break;
    case RopeSpec::Scaling::kNone:
    case RopeSpec::Scaling::kLinear:
    case RopeSpec::Scaling::kDynamic:
    case RopeSpec::Scaling::kProportional:  // they have no original_max_position_embeddings to count by
      table.fail("rope_type", "is not supported for ministral3, only yarn, llama3 and longrope are");
  }
  for (LayerSpec& layer : spec.layers) {
    layer.attention().position_slope = slope;
    layer.attention().position_period = slope > 0 ? rope.original_max_position : 0;
  }
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "attention_bias");
  refuse_if_set(config, spec, "mlp_bias");
  const int64_t window = read_window(config, 0);
  for (LayerSpec& layer : spec.layers) layer.attention().window = window;
  check_layer_types(config, spec);
}

}  // namespace

const Family ministral3 = {
    .model_type = "ministral3",
    .architecture = "Ministral3ForCausalLM",
    .wrapper = "mistral3",
    .wrapper_architecture = "Mistral3ForConditionalGeneration",
    .sizes = {.hidden = 4096, .ffn = 14336, .layers = 34, .heads = 32, .vocab = 131072},
    .max_positions = 262144,
    .kv_heads = 8,
    .head_dim = 128,
    .norm_eps = 1e-5,
    .rope_theta = 1e4,
    .pad_token = 11,
    .read_layers = read_layers,
    .read_ropes = read_ropes};

}  // namespace lm::families
