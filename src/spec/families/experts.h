// What families with mixtures of experts have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

inline constexpr int64_t kMostExpertFfn = int64_t{1} << 22;

// What a class assumes where the file is silent.
struct AssumedExperts {
  int64_t experts = 0, chosen = 0;  // 0: nothing, the file must say
  int64_t ffn = 0;          // of moe_intermediate_size; 0: experts are as wide as intermediate_size says
  double aux_loss = 0.001;  // router_aux_loss_coef
};

// num_experts (or num_local_experts), num_experts_per_tok and the experts' width; and into `spec` the
// coefficient of the loss that balances them. `renormalise` and what else a family has of its own are left to
// it.
ExpertsSpec read_experts(const ConfigReader& config, const AssumedExperts& assumed, ModelSpec& spec);

// n_group, topk_group and routed_scaling_factor of a router with sigmoid scores (DeepSeek-V3's).
void read_sigmoid_scores(const ConfigReader& config, ExpertsSpec& experts);

// Puts them in place of the MLP of all layers from `first` on; or of those that mlp_only_layers does not name
// and whose number, counted from 1, is a multiple of decoder_sparse_step.
void put_experts(const ExpertsSpec& experts, ModelSpec& spec, int64_t first = 0);
void put_some_experts(const ConfigReader& config, const ExpertsSpec& experts, ModelSpec& spec);

// Puts it beside the experts of all layers that have some.
void put_shared_expert(const SharedExpertSpec& shared, ModelSpec& spec);

// Llama's names with the router and the experts of most families, beside those of layers without experts.
NameMap expert_names();
// The same as Mixtral's files have them.
NameMap mixtral_names();
// Family::class_names: one tensor for gate and up of all experts, and one for down. Mixtral's have another
// module's name, too.
NameMap stacked_names(NameMap names);
NameMap mixtral_class_names(NameMap names);

}  // namespace lm::families
