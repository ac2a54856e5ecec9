// Granite 4 without experts and Mamba layers (micro, 1b, 350m): Granite 3 by other names, with or without
// RoPE.
#include <fmt/format.h>

#include "spec/families/granite.h"

namespace lm::families {
namespace {

// The MLP that stands beside the experts where there are some.
constexpr KeyAlias kAliases[] = {{"intermediate_size", "shared_intermediate_size"}};

NameMap names() {
  return with_modules(llama_names(), {{"self_attn.q_proj", "attn.q"},
                                      {"self_attn.k_proj", "attn.k"},
                                      {"self_attn.v_proj", "attn.v"},
                                      {"self_attn.o_proj", "attn.o"},
                                      {"shared_mlp.input_linear", "mlp.gate", "mlp.up"},
                                      {"shared_mlp.output_linear", "mlp.down"}});
}

void refuse_mamba(const ConfigReader& config, const ModelSpec& spec) {
  constexpr const char* kTypes = "layer_types";
  const Json* const types = config.find(kTypes);
  if (types == nullptr)
    config.fail(kTypes, "is missing, which means Mamba layers alone: they are not supported yet");
  if (!types->is_array() || types->size() != spec.layers.size()) {
    config.fail(kTypes,
                fmt::format("must be a list with one entry for each of the {} layers", spec.layers.size()));
  }
  for (size_t i = 0; i < types->size(); ++i) {
    if ((*types)[i] == "mamba" || (*types)[i] == "linear_attention")
      config.fail(kTypes, fmt::format("entry {} is a Mamba layer, which is not supported yet", i));
  }
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  if (config.count("num_local_experts", 8, kMostPositions) > 0)
    config.fail("num_local_experts", "other than 0 (missing: 8) is not supported yet: it needs experts");
  refuse_mamba(config, spec);
  refuse_if_set(config, spec, "mlp_bias");
  read_attention_bias(config, spec);
  read_multipliers(config, spec);
  check_layer_types(config, spec);
}

void read_ropes(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  constexpr const char* kKey = "position_embedding_type";
  const std::string type = config.text(kKey).value_or("nope");
  if (type == "rope") return read_rope(config, family, spec);
  if (type != "nope")
    config.fail(kKey, "= \"" + type.substr(0, 100) + "\" is not supported, only rope and nope are");
  for (LayerSpec& layer : spec.layers) layer.attention().rope = AttentionSpec::kNoRope;
}

}  // namespace

const Family granitemoehybrid = {.model_type = "granitemoehybrid",
                                 .architecture = "GraniteMoeHybridForCausalLM",
                                 .aliases = kAliases,
                                 .max_positions = 2048,
                                 .names = names,
                                 .read_layers = read_layers,
                                 .read_ropes = read_ropes};

}  // namespace lm::families
