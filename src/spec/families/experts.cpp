#include "spec/families/experts.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/expert_count.h"

namespace lm::families {
namespace {

constexpr int64_t kMostChosen = 64;
constexpr double kMostAuxLoss = 1e6;

void put(const ExpertsSpec& experts, LayerSpec& layer) {
  for (SublayerSpec& sublayer : layer.sublayers)
    if (std::holds_alternative<GatedMlpSpec>(sublayer.mixer)) sublayer.mixer = experts;
}

// mlp_only_layers: whether each layer is in it.
std::vector<bool> read_dense_layers(const ConfigReader& config, size_t layers) {
  constexpr const char* kKey = "mlp_only_layers";
  std::vector<bool> out(layers);
  const Json* const list = config.find(kKey);
  if (list == nullptr) return out;
  if (!list->is_array()) config.fail(kKey, "must be a list of layers' numbers");
  for (const Json& number : *list) {
    if (!number.is_number_integer()) config.fail(kKey, "must be a list of layers' numbers");
    // The reference asks whether a layer is in the list: other numbers mean nothing.
    const auto layer = number.is_number_unsigned() ? number.get<uint64_t>() : uint64_t{layers};
    if (layer < layers) out[layer] = true;
  }
  return out;
}

}  // namespace

ExpertsSpec read_experts(const ConfigReader& config, const AssumedExperts& assumed, ModelSpec& spec) {
  // Two words for one number: transformers has written either.
  const char* const key = config.find("num_local_experts") ? "num_local_experts" : "num_experts";
  const auto size = [&](const char* of, int64_t missing, int64_t most) {
    return missing > 0 ? config.size(of, missing, most) : config.required_size(of, most);
  };
  ExpertsSpec out{.activation = spec.layers.front().mlp().activation,
                  .experts = size(key, assumed.experts, kMostExperts),
                  .chosen = size("num_experts_per_tok", assumed.chosen, kMostChosen)};
  if (out.chosen > out.experts) {
    config.fail("num_experts_per_tok",
                fmt::format("= {} is more than {} = {}", out.chosen, key, out.experts));
  }
  out.ffn = assumed.ffn > 0 ? config.size("moe_intermediate_size", assumed.ffn, kMostExpertFfn)
                            : spec.layers.front().mlp().ffn;
  const double coefficient = config.number("router_aux_loss_coef", assumed.aux_loss);
  if (coefficient < 0 || coefficient > kMostAuxLoss)
    config.fail("router_aux_loss_coef", fmt::format("= {} is not from 0 to {}", coefficient, kMostAuxLoss));
  if (config.boolean("output_router_logits", false)) spec.router_aux_loss = coefficient;
  return out;
}

void read_sigmoid_scores(const ConfigReader& config, ExpertsSpec& experts) {
  experts.scores = RouterScores::kSigmoid;
  experts.weight_scale = config.positive("routed_scaling_factor", 1);
  experts.groups = config.size("n_group", 1, kMostExperts);
  experts.kept_groups = config.size("topk_group", 1, kMostExperts);
  const int64_t each = experts.experts / experts.groups;
  // A group is judged by its two best.
  if (experts.experts % experts.groups != 0 || each < 2) {
    config.fail("n_group", fmt::format("= {} does not make groups of one size, of 2 or more, of {} experts",
                                       experts.groups, experts.experts));
  }
  if (experts.kept_groups > experts.groups || experts.kept_groups * each < experts.chosen) {
    config.fail("topk_group",
                fmt::format("= {} of {} groups of {} experts, of which {} are chosen: expected at least as "
                            "many experts as are chosen, and no more groups than there are",
                            experts.kept_groups, experts.groups, each, experts.chosen));
  }
}

void put_experts(const ExpertsSpec& experts, ModelSpec& spec, int64_t first) {
  for (int64_t i = first; i < spec.layer_count(); ++i) put(experts, spec.layers[static_cast<size_t>(i)]);
}

void put_some_experts(const ConfigReader& config, const ExpertsSpec& experts, ModelSpec& spec) {
  const std::vector<bool> dense = read_dense_layers(config, spec.layers.size());
  const auto step = static_cast<size_t>(config.size("decoder_sparse_step", 1, kMostPositions));
  for (size_t i = 0; i < spec.layers.size(); ++i)
    if (!dense[i] && (i + 1) % step == 0) put(experts, spec.layers[i]);
}

void put_shared_expert(const SharedExpertSpec& shared, ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers) {
    if (layer.find<ExpertsSpec>() == nullptr) continue;
    LM_CHECK(std::holds_alternative<ExpertsSpec>(layer.sublayers.back().mixer), "experts come last");
    layer.sublayers.push_back({.norm = {},
                               .mixer = shared,
                               .residual_scale = layer.sublayers.back().residual_scale,
                               .beside = true});
  }
}

NameMap expert_names() {
  NameMap names = llama_names();
  names.modules.insert(names.modules.end(), {{"mlp.gate", "experts.router"},
                                             {"mlp.experts.*.gate_proj", "experts.gate"},
                                             {"mlp.experts.*.up_proj", "experts.up"},
                                             {"mlp.experts.*.down_proj", "experts.down"}});
  names.experts = "mlp.experts";
  return names;
}

NameMap mixtral_names() {
  NameMap names = with_modules(llama_names(), {{"self_attn.q_proj", "attn.q"},
                                               {"self_attn.k_proj", "attn.k"},
                                               {"self_attn.v_proj", "attn.v"},
                                               {"self_attn.o_proj", "attn.o"},
                                               {"block_sparse_moe.gate", "experts.router"},
                                               {"block_sparse_moe.experts.*.w1", "experts.gate"},
                                               {"block_sparse_moe.experts.*.w3", "experts.up"},
                                               {"block_sparse_moe.experts.*.w2", "experts.down"}});
  names.experts = "mlp.experts";
  return names;
}

NameMap stacked_names(NameMap names) {
  const auto end_of = [](const ModuleName& module) { return std::strrchr(module.path, '.') + 1; };
  std::vector<ModuleName> modules;
  for (const ModuleName& module : names.modules) {
    const std::string_view ours = module.first;
    if (ours == "experts.gate") {
      modules.push_back({.path = "mlp.experts.gate_up_proj.*",
                         .first = "experts.gate",
                         .last = "experts.up",
                         .weight = "",
                         .each = {end_of(module)}});
    } else if (ours == "experts.up") {
      modules.back().each.push_back(end_of(module));
    } else if (ours == "experts.down") {
      modules.push_back({.path = "mlp.experts.down_proj.*",
                         .first = "experts.down",
                         .weight = "",
                         .each = {end_of(module)}});
    } else {
      modules.push_back(module);
    }
  }
  return with_modules(std::move(names), std::move(modules));
}

NameMap mixtral_class_names(NameMap names) {
  names = stacked_names(std::move(names));
  for (ModuleName& module : names.modules)
    if (std::string_view(module.first) == "experts.router") module.path = "mlp.gate";
  for (VectorName& vector : names.vectors)
    if (std::string_view(vector.ours) == "experts.correction") vector.path = "mlp.e_score_correction_bias";
  return names;
}

}  // namespace lm::families
