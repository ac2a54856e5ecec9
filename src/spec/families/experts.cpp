#include "spec/families/experts.h"

#include <fmt/format.h>
#include <algorithm>

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
  ExpertsSpec out{.activation = spec.layers.front().mlp().activation,
                  .experts = config.size(key, assumed.experts, kMostExperts),
                  .chosen = config.size("num_experts_per_tok", assumed.chosen, kMostChosen)};
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

void put_experts(const ExpertsSpec& experts, ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers) put(experts, layer);
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

}  // namespace lm::families
