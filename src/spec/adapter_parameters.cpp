#include "spec/adapter_parameters.h"

#include <fmt/format.h>
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"
#include "spec/adapter_sites.h"
#include "spec/expert_adapters.h"

namespace lm {
namespace {

// Of the targets in layer `i`: what is trained or, with `starts`, the pairs that this began with.
std::vector<Parameter> layer_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i,
                                      bool starts) {
  std::vector<Parameter> out, magnitudes;
  for (const LinearModule& module : linear_modules(spec, i)) {
    if (!module.adapts) continue;
    const std::string hf = fmt::format("{}{}.{}", spec.names.layers, i, module.path);
    if (!adapter.adapts(i, hf)) continue;
    const std::string ours = fmt::format("layers.{}.{}", i, module.name);
    const int64_t rank = adapter.rank_of(hf);
    // `name` in our names and in the files, where `end` follows.
    const auto make = [&](TrainableRole role, const std::string& name, const char* end, int64_t rows,
                          int64_t columns) {
      const bool vector = role == TrainableRole::kMagnitude;
      Parameter made = single(ours + name, vector ? ParameterKind::kMagnitude : ParameterKind::kMatrix,
                              std::string(kAdapterPrefix) + hf + name + end, rows, columns);
      made.role = role;
      made.owner = hf + ".weight";
      made.site = hf;
      return made;
    };
    if (starts) {
      out.push_back(make(TrainableRole::kStartA, ".start_A", "", rank, module.columns));
      out.push_back(make(TrainableRole::kStartB, ".start_B", "", module.rows, rank));
      continue;
    }
    out.push_back(make(TrainableRole::kLoraA, ".lora_A", ".weight", rank, module.columns));
    out.push_back(make(TrainableRole::kLoraB, ".lora_B", ".weight", module.rows, rank));
    if (adapter.dora)
      magnitudes.push_back(make(TrainableRole::kMagnitude, ".lora_magnitude_vector", "", module.rows, 1));
  }
  if (!starts) std::ranges::move(expert_adapters(spec, adapter, i), std::back_inserter(out));
  std::ranges::move(magnitudes, std::back_inserter(out));  // what has no decay comes last
  return out;
}

// LoRA's of an untied head.
std::vector<Parameter> head_adapters(const ModelSpec& spec, const AdapterSpec& adapter) {
  const std::string path = spec.names.head;
  if (spec.tied || spec.scores() || !adapter.adapts(kNoLayer, path)) return {};
  const int64_t rank = adapter.rank_of(path);
  std::vector<Parameter> out = {
      single("head.lora_A", ParameterKind::kMatrix, std::string(kAdapterPrefix) + path + ".lora_A.weight",
             rank, spec.hidden),
      single("head.lora_B", ParameterKind::kMatrix, std::string(kAdapterPrefix) + path + ".lora_B.weight",
             spec.vocab, rank)};
  out[0].role = TrainableRole::kLoraA;
  out[1].role = TrainableRole::kLoraB;
  for (Parameter& one : out) {
    one.owner = path + ".weight";
    one.site = path;
  }
  return out;
}

// LoRA's of the embedding, as if its table were a linear layer's matrix [V, H]: B [V, r] is peft's
// lora_embedding_A, and A [r, H] its lora_embedding_B, both transposed in its files. B begins with zeros, as
// that does.
std::vector<Parameter> table_adapters(const ModelSpec& spec, const AdapterSpec& adapter) {
  const std::string path = spec.names.embedding, prefix = std::string(kAdapterPrefix) + path;
  if (spec.tied || adapter.kind != AdapterKind::kLora || !adapter.adapts(kNoLayer, path)) return {};
  const int64_t rank = adapter.rank_of(path);
  std::vector<Parameter> out = {
      single("embed.lora_A", ParameterKind::kEmbedding, prefix + ".lora_embedding_B", rank, spec.hidden),
      single("embed.lora_B", ParameterKind::kEmbedding, prefix + ".lora_embedding_A", spec.vocab, rank)};
  out[0].role = TrainableRole::kLoraA;
  out[1].role = TrainableRole::kLoraB;
  for (Parameter& one : out) {
    one.owner = path + ".weight";
    one.site = path;
    one.parts.front().transposed = true;
  }
  return out;
}

// Copies of the biases among layer `i`'s parameters that are trained beside pairs; `i` < 0: of other blocks.
// Their names in the files are peft's, where a layer with pairs stands around the base's.
std::vector<Parameter> bias_copies(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i,
                                   const std::vector<Parameter>& base) {
  std::vector<Parameter> out;
  if (adapter.bias == AdapterBias::kNone) return out;
  const std::vector<LinearModule> modules = i < 0 ? std::vector<LinearModule>{} : linear_modules(spec, i);
  for (const Parameter& parameter : base) {
    if (parameter.kind != ParameterKind::kBias) continue;
    for (const ParameterPart& part : parameter.parts) {
      if (adapter.trains_whole(part.name)) continue;  // a norm's, itself
      const std::string path = part.name.substr(0, part.name.rfind('.'));
      const auto module = std::ranges::find_if(
          modules, [&](const LinearModule& one) { return path.ends_with("." + one.path); });
      const bool linear = module != modules.end(), adapted = linear && adapter.adapts(i, path);
      if (!adapted && adapter.bias == AdapterBias::kLoraOnly) continue;
      out.push_back(
          single(linear ? fmt::format("layers.{}.{}.bias", i, module->name) : parameter.name + "_tuned",
                 ParameterKind::kBias,
                 std::string(kAdapterPrefix) + path + (adapted ? ".base_layer.bias" : ".bias"), part.rows));
      out.back().role = linear ? TrainableRole::kBias : TrainableRole::kReplacement;
      out.back().owner = part.name;
      out.back().parts.front().heads = part.heads;
    }
  }
  return out;
}

// IA3's, of the targets in layer `i`.
std::vector<Parameter> layer_scales(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  std::vector<Parameter> out;
  for (const LinearModule& module : linear_modules(spec, i)) {
    if (!module.adapts) continue;
    const std::string hf = fmt::format("{}{}.{}", spec.names.layers, i, module.path);
    if (!adapter.adapts(i, hf)) continue;
    const bool input = module.feedforward();
    out.push_back(single(fmt::format("layers.{}.{}.ia3_l", i, module.name), ParameterKind::kMagnitude,
                         std::string(kAdapterPrefix) + hf + ".ia3_l", input ? module.columns : module.rows));
    out.back().role = input ? TrainableRole::kInputScale : TrainableRole::kOutputScale;
    out.back().owner = hf + ".weight";
  }
  return out;
}

// Copies of the target norms' weights and biases among a block's parameters.
std::vector<Parameter> replacements(const std::vector<Parameter>& base, const AdapterSpec& adapter) {
  std::vector<Parameter> out;
  for (const Parameter& parameter : base) {
    const std::string& name = parameter.parts.front().name;
    const size_t end = name.rfind('.');
    if (!parameter.vector() || parameter.parts.size() > 1) continue;
    if (!adapter.adapts(0, std::string_view(name).substr(0, end))) continue;
    Parameter& copy = out.emplace_back(parameter);
    copy.name += "_tuned";
    copy.role = TrainableRole::kReplacement;
    copy.owner = name;
    copy.parts.front().name =
        std::string(kAdapterPrefix) + name.substr(0, end) + ".ln_tuning_layers" + name.substr(end);
  }
  return out;
}

// A layer's columns of the one tensor that prefix tuning has in its files.
Parameter layer_prefix(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  const AttentionSpec* const attention = common_attention(spec);
  LM_CHECK(attention != nullptr, "a prefix has keys and values of one size in every layer");
  const int64_t columns = 2 * attention->kv_rows();
  Parameter out = single(fmt::format("layers.{}.attn.prefix", i), ParameterKind::kEmbedding,
                         fmt::format("{}.{}", kPromptTensor, i), adapter.virtual_tokens, columns);
  out.role = TrainableRole::kPrefix;
  out.parts.front().file = kPromptTensor;
  out.parts.front().column = i * columns;
  out.parts.front().file_columns = spec.layer_count() * columns;
  return out;
}

// What a prompt's embeddings are made of: the tokens' own, and an MLP of three layers (P-tuning). Numbers as
// in torch's Sequential, whose layers 1 and 3 are ReLUs.
std::vector<Parameter> encoder_parameters(const ModelSpec& spec, const AdapterSpec& adapter) {
  const std::string files(kEncoderPrefix);
  std::vector<Parameter> out = {single("prompt", ParameterKind::kEmbedding, files + "embedding.weight",
                                       adapter.virtual_tokens, spec.hidden)};
  out.front().role = TrainableRole::kPrompt;
  const int64_t sizes[] = {spec.hidden, adapter.encoder, adapter.encoder, spec.hidden};
  for (const bool bias : {false, true}) {  // what has no decay comes last
    for (size_t i = 0; i < 3; ++i) {
      const char* const kind = bias ? "bias" : "weight";
      out.push_back(single(
          fmt::format("encoder.{}.{}", 2 * i, kind), bias ? ParameterKind::kBias : ParameterKind::kMatrix,
          fmt::format("{}mlp_head.{}.{}", files, 2 * i, kind), sizes[i + 1], bias ? 1 : sizes[i]));
      out.back().role = TrainableRole::kEncoder;
      out.back().fan_in = sizes[i];
    }
  }
  return out;
}

}  // namespace

Parameter single(const std::string& name, ParameterKind kind, const std::string& hf, int64_t rows,
                 int64_t columns) {
  return {.name = name, .kind = kind, .rows = rows, .columns = columns, .parts = {{hf, 0, rows}}};
}

std::vector<Parameter> block_starts(const ModelSpec& spec, const AdapterSpec* adapter, int64_t layer) {
  return adapter == nullptr || !adapter->pissa ? std::vector<Parameter>{}
                                               : layer_adapters(spec, *adapter, layer, true);
}

std::vector<Parameter> block_adapters(const ModelSpec& spec, const AdapterSpec* adapter, int64_t layer,
                                      const std::vector<Parameter>& base) {
  if (adapter == nullptr) return {};
  switch (adapter->kind) {
    case AdapterKind::kLora: {
      std::vector<Parameter> out =
          layer == kNoLayer ? head_adapters(spec, *adapter) : layer_adapters(spec, *adapter, layer, false);
      std::ranges::move(bias_copies(spec, *adapter, layer, base), std::back_inserter(out));
      return out;
    }
    case AdapterKind::kIa3:
      return layer < 0 ? std::vector<Parameter>{} : layer_scales(spec, *adapter, layer);
    case AdapterKind::kNorms:
      return replacements(base, *adapter);
    case AdapterKind::kPrefix:
      return layer < 0 ? std::vector<Parameter>{} : std::vector{layer_prefix(spec, *adapter, layer)};
    case AdapterKind::kPrompt:
      return {};
  }
  return {};
}

std::vector<Parameter> embedding_adapters(const ModelSpec& spec, const AdapterSpec* adapter) {
  if (adapter != nullptr && adapter->encoder > 0) return encoder_parameters(spec, *adapter);
  if (adapter != nullptr && adapter->kind == AdapterKind::kPrompt) {
    Parameter prompt = single("prompt", ParameterKind::kEmbedding, std::string(kPromptTensor),
                              adapter->virtual_tokens, spec.hidden);
    prompt.role = TrainableRole::kPrompt;
    return {prompt};
  }
  if (adapter == nullptr) return {};
  std::vector<Parameter> pairs = table_adapters(spec, *adapter);
  if (!pairs.empty() || adapter->tokens.empty()) return pairs;
  Parameter rows =
      single("embed.tokens", ParameterKind::kEmbedding,
             std::string(kAdapterPrefix) + spec.names.embedding + ".token_adapter.trainable_tokens_delta",
             std::ssize(adapter->tokens), spec.hidden);
  rows.role = TrainableRole::kTokenRows;
  rows.owner = spec.names.embedding + std::string(".weight");
  return {rows};
}

void split_base(const ModelSpec& spec, const AdapterSpec& adapter, std::vector<Parameter>&& base,
                std::vector<Parameter>&& adapters, BlockParameters& block) {
  std::vector<Parameter> vectors;
  for (Parameter& parameter : base) {
    std::string& name = parameter.parts.front().name;
    const bool whole = (spec.scores() && parameter.name == "head") ||
                       (parameter.parts.size() == 1 && adapter.trains_whole(name));
    if (!whole) {
      block.frozen.push_back(std::move(parameter));
      continue;
    }
    parameter.role = TrainableRole::kWhole;
    name = std::string(kAdapterPrefix) + name;
    (parameter.vector() ? vectors : block.trainable).push_back(std::move(parameter));
  }
  std::ranges::move(adapters, std::back_inserter(block.trainable));
  std::ranges::move(vectors, std::back_inserter(block.trainable));
}

}  // namespace lm
