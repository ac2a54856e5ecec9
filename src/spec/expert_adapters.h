// LoRA on a mixture's experts. transformers 5 holds a layer's experts in two parameters, gate_up_proj
// [E, 2I, H] and down_proj [E, H, I], and peft wraps those (target_parameters): such a stack has one rank and
// one alpha, and each of its E matrices a pair A_e [r, in], B_e [out, r] of that rank. Here each pair is two
// parameters of its own beside the expert's matrix; the files have those of all experts in two tensors. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/model_spec.h"
#include "spec/parameter.h"

namespace lm {

// A matrix of each expert of a layer, as one parameter of transformers' class.
struct ExpertStack {
  std::string name;         // "experts.gate_up_proj"
  std::string path;         // "model.layers.3.mlp.experts.gate_up_proj"
  const char* matrix = "";  // of an expert: "gate_up"
  int64_t experts = 0, rows = 0, columns = 0;
};

// Of layer `i`, in the order in which the class declares them. None where the layer has no experts, or those
// of the family have no pairs.
std::vector<ExpertStack> expert_stacks(const ModelSpec& spec, int64_t i);

// Whether it has pairs of experts.
bool adapts_experts(const ModelSpec& spec, const AdapterSpec& adapter);

// The pairs of the stacks in layer `i` that are adapted, expert by expert:
// layers.i.experts.<e>.gate_up.lora_A [r, in], .lora_B [out, r]. In the files, by the name of the stacks'
// module: where both are adapted the first one's wrapper lies inside the second's, and has the names
// <module>.base_layer.lora_A.weight and .lora_B; what lies outside has <module>.lora_A.weight. A is [E r,
// in], expert by expert; B is [out, r E], whose column j E + e is column j of expert e's.
std::vector<Parameter> expert_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i);

}  // namespace lm
