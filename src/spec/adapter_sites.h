// Which modules of a model get an adapter, each with its rank and alpha: every linear layer as a list, and
// the shortest AdapterSpec of a choice among them. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "spec/parameter.h"

namespace lm {

// Of a module that is in no layer: lora.layers does not concern it.
inline constexpr int64_t kNoLayer = -1;

struct AdapterModule {
  int64_t layer = 0;         // kNoLayer: the embedding, the head
  std::string name;          // LinearModule::name: "q_proj"
  std::string path;          // "model.layers.3.self_attn.q_proj"
  bool feedforward = false;  // as LinearModule has it
  bool stacked = false;      // a matrix of each expert of the layer (spec/expert_adapters.h)
};
// Those that adapters may target, layer by layer, in the order of linear_modules.
std::vector<AdapterModule> adapter_modules(const ModelSpec& spec);
// Those that LoRA may adapt: these, of an untied model the embedding and the head, and the experts' matrices.
std::vector<AdapterModule> lora_modules(const ModelSpec& spec);
// Whether peft 0.21 reads the name of a dense or shared MLP's matrix as that of all experts of the model: it
// loads such an adapter wrongly, or not at all. Named in targets they get adapters all the same.
bool peft_takes_for_experts(const ModelSpec& spec, const AdapterModule& module);
// The norms with a weight of the layers, and the final one, whose layer is the number of layers. A norm's
// name is the end of its path.
std::vector<AdapterModule> norm_modules(const ModelSpec& spec);
// The modules that peft's IA3 and LN tuning have where no target_modules are given: by model_type, empty
// where it has no such list.
std::vector<std::string> default_targets(const ModelSpec& spec, AdapterKind kind);
// The shortest targets that choose these of the modules: names where all that have the name are chosen, else
// whole paths.
std::vector<std::string> shortest_targets(const std::vector<AdapterModule>& modules,
                                          const std::vector<bool>& chosen);

// Whether `path` is `name` or ends in "." and `name`.
bool names_module(std::string_view name, std::string_view path);
// The path of the module whose weight has this name.
std::string_view module_of(std::string_view weight);

struct AdapterSite {
  size_t module = 0;  // its place in the list
  int64_t r = 0;
  double alpha = 0;
};
// In the order of the list.
std::vector<AdapterSite> list_sites(const std::vector<AdapterModule>& modules, const AdapterSpec& adapter);

// Sets targets, layers, ranks and alphas of `adapter` to the shortest form of these sites: names where all
// layers, or the same layers, have them, else whole paths. A rank or alpha that all sites have becomes `r` or
// `alpha`. So adapters with equal sites, r and alpha are equal. REQUIRES: sites in the order of the list, at
// least one.
void set_sites(const std::vector<AdapterModule>& modules, const std::vector<AdapterSite>& sites,
               AdapterSpec& adapter);

}  // namespace lm
