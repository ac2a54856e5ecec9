#include "plan/adapter_limits.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "config/config_text.h"
#include "spec/adapter_sites.h"
#include "spec/expert_adapters.h"

namespace lm {
namespace {

bool adapts_head(const ModelSpec& model, const AdapterSpec& adapter) {
  return !model.tied && !model.scores() && adapter.adapts(kNoLayer, model.names.head);
}

bool adapts_embedding(const ModelSpec& model, const AdapterSpec& adapter) {
  return !model.tied && adapter.adapts(kNoLayer, model.names.embedding);
}

// `module` is called `name` in messages. `dropout`: it would have one.
void require_plain(const char* module, const std::string& name, const AdapterSpec& adapter, bool dropout) {
  const std::string beside = std::string("lora.targets has ") + module + ", " + value_text(name) + ", and ",
                    out = std::string(module) + " out of lora.targets";
  if (adapter.dora)
    throw lora_error(beside + "lora.dora = true: its rows' lengths are not trained",
                     "leave " + out + ", or lora.dora out");
  if (dropout)
    throw lora_error(beside + "lora.dropout: its adapter has none",
                     "leave " + out + ", or set lora.dropout = 0");
  if (adapter.pissa)
    throw lora_error(beside + "lora.start = \"pissa\": " + module + " is not decomposed",
                     "leave " + out + ", or lora.start out");
  if (adapter.trains_whole(name + ".weight"))
    throw lora_error(beside + "lora.also trains it whole", "leave it out of one of the two");
}

}  // namespace

Error lora_error(std::string what, std::string next) {
  return setting_error(std::move(what), "", std::move(next));
}

void require_biases(const ModelSpec& model, const AdapterSpec& adapter) {
  if (adapter.bias == AdapterBias::kNone) return;
  const auto of_experts = [](const LayerSpec& layer) {
    const auto* const experts = layer.find<ExpertsSpec>();
    return experts != nullptr && experts->bias;
  };
  if (adapter.bias == AdapterBias::kAll && std::ranges::any_of(model.layers, of_experts))
    throw lora_error("lora.bias = \"all\": biases of experts are not trained beside adapters",
                     "set lora.bias = \"lora_only\", or leave it out");
  for (const BlockParameters& block : list_parameters(model, &adapter)) {
    for (const Parameter& parameter : block.trainable)
      if (parameter.kind == ParameterKind::kBias) return;
  }
  const bool all = adapter.bias == AdapterBias::kAll;
  throw lora_error(fmt::format("lora.bias = {}: {} no bias", value_text(adapter.bias),
                               all ? "the model has" : "the layers that get adapters have"),
                   all ? "leave lora.bias out" : "set lora.bias = \"all\", or leave it out");
}

void require_type_of_model(const ModelSpec& model, const Config& config, const AdapterSpec& adapter) {
  const bool head = adapts_head(model, adapter), table = adapts_embedding(model, adapter);
  if (!has_fp32_adapters(config) || config.model.dtype == ModelDType::kF32) return;
  if (adapter.also.empty() && !head && !table) return;
  throw lora_error(std::string(head    ? "an adapter of the head is"
                               : table ? "an adapter of the embedding is"
                                       : "lora.also trains modules of the model") +
                       " in model.dtype = " + value_text(config.model.dtype) +
                       ", and lora.dtype = \"fp32\" is written",
                   "leave lora.dtype out: bf16 and fp16 weights have fp32 master weights");
}

void require_plain_vocabulary(const ModelSpec& model, const AdapterSpec& adapter) {
  if (adapts_head(model, adapter)) require_plain("the head", model.names.head, adapter, adapter.dropout > 0);
  if (adapts_embedding(model, adapter)) require_plain("the embedding", model.names.embedding, adapter, false);
}

void require_experts(const ModelSpec& model) {
  const auto has = [](const LayerSpec& layer) { return layer.find<ExpertsSpec>() != nullptr; };
  if (!std::ranges::any_of(model.layers, has))
    throw lora_error("lora.experts = true adapts a mixture's experts, and a model of type " +
                         model.model_type + " has none",
                     "leave lora.experts out");
  if (*model.names.experts == '\0')
    throw lora_error("lora.experts = true is not supported for model_type = " + model.model_type + " yet",
                     "leave lora.experts out: lora.targets then adapts the attention, and the expert that "
                     "all tokens meet");
}

void require_plain_experts(const ModelSpec& model, const AdapterSpec& adapter, LoraStart start) {
  if (!adapts_experts(model, adapter)) return;
  const std::string out = "leave adapters of experts out (lora.experts, lora.targets), or ";
  if (adapter.dropout > 0)
    throw lora_error("experts get adapters, and lora.dropout is set: peft's pairs of experts have none",
                     out + "set lora.dropout = 0");
  if (adapter.dora)
    throw lora_error(
        "experts get adapters, and lora.dora = true: the lengths of experts' rows are not trained",
        out + "lora.dora");
  if (start != LoraStart::kZero || adapter.pissa)
    throw lora_error("experts get adapters, and lora.start = " + value_text(start) +
                         ": experts' pairs do not start from the base",
                     out + "lora.start");
}

}  // namespace lm
