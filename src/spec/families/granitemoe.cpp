// Granite 3 with experts in every layer (1B-A400M, 3B-A800M): the weights of a token's experts are the
// softmax over their logits alone, which is that over all logits, divided by the sum of theirs.
#include <string_view>

#include "spec/families/experts.h"
#include "spec/families/granite.h"

namespace lm::families {
namespace {

// One tensor for the first matrices of all experts, and one for the last ones.
NameMap names() {
  NameMap names =
      with_modules(llama_names(), {{"self_attn.q_proj", "attn.q"},
                                   {"self_attn.k_proj", "attn.k"},
                                   {"self_attn.v_proj", "attn.v"},
                                   {"self_attn.o_proj", "attn.o"},
                                   {"block_sparse_moe.router.layer", "experts.router"},
                                   {"block_sparse_moe.input_linear.*", "experts.gate", "experts.up"},
                                   {"block_sparse_moe.output_linear.*", "experts.down"}});
  names.experts = "block_sparse_moe.experts";
  return names;
}

// One tensor of all experts has another name, and so has the router.
NameMap class_names(NameMap names) {
  for (ModuleName& module : names.modules) {
    const std::string_view ours = module.first;
    if (ours == "experts.router") module.path = "block_sparse_moe.router";
    if (ours == "experts.gate") module.path = "block_sparse_moe.experts.gate_up_proj.*", module.weight = "";
    if (ours == "experts.down") module.path = "block_sparse_moe.experts.down_proj.*", module.weight = "";
  }
  return names;
}

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  read_attention_bias(config, spec);
  read_multipliers(config, spec);
  check_layer_types(config, spec);
  ExpertsSpec experts = read_experts(config, {.experts = 8, .chosen = 2}, spec);
  experts.renormalise = true;
  experts.round_weights = true;
  put_experts(experts, spec);
}

}  // namespace

const Family granitemoe = {.model_type = "granitemoe",
                           .architecture = "GraniteMoeForCausalLM",
                           .max_positions = 2048,
                           .names = names,
                           .class_names = class_names,
                           .read_layers = read_layers};

}  // namespace lm::families
