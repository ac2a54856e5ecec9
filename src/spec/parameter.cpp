#include "spec/parameter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// The seven projections of a block, in block order.
struct Module {
  const char* name;    // "q_proj"
  const char* parent;  // "self_attn"
  int64_t out = 0;
  int64_t in = 0;
};

std::array<Module, 7> modules_of(const ModelSpec& spec) {
  const int64_t h = spec.hidden, f = spec.ffn, q = spec.q_rows(), kv = spec.kv_rows();
  return {{{"q_proj", "self_attn", q, h},
           {"k_proj", "self_attn", kv, h},
           {"v_proj", "self_attn", kv, h},
           {"o_proj", "self_attn", h, q},
           {"gate_proj", "mlp", f, h},
           {"up_proj", "mlp", f, h},
           {"down_proj", "mlp", h, f}}};
}

// A parameter that joins the tensors `suffix` of modules [first, last): their rows one after another.
Parameter join(const std::string& name, ParameterKind kind, const std::string& layer,
               const std::array<Module, 7>& modules, size_t first, size_t last, const char* suffix) {
  Parameter parameter{.name = name, .kind = kind, .rows = 0, .columns = 1, .parts = {}};
  for (size_t m = first; m < last; ++m) {
    const Module& module = modules[m];
    parameter.parts.push_back(
        {layer + module.parent + "." + module.name + suffix, parameter.rows, module.out});
    parameter.rows += module.out;
    if (kind == ParameterKind::kMatrix) parameter.columns = module.in;
  }
  return parameter;
}

Parameter single(const std::string& name, ParameterKind kind, const std::string& hf, int64_t rows,
                 int64_t columns = 1) {
  return {.name = name, .kind = kind, .rows = rows, .columns = columns, .parts = {{hf, 0, rows}}};
}

// The base model's parameters of layer `i`: matrices, norms, biases.
std::vector<Parameter> layer_parameters(const ModelSpec& spec, int64_t i) {
  const std::string ours = "layers." + std::to_string(i) + ".";
  const std::string hf = "model.layers." + std::to_string(i) + ".";
  const auto modules = modules_of(spec);
  auto matrix = [&](const char* name, size_t first, size_t last) {
    return join(ours + name, ParameterKind::kMatrix, hf, modules, first, last, ".weight");
  };
  auto bias = [&](const char* name, size_t first, size_t last) {
    return join(ours + name, ParameterKind::kBias, hf, modules, first, last, ".bias");
  };
  auto norm = [&](const char* name, const char* theirs, int64_t n) {
    return single(ours + name, ParameterKind::kNorm, hf + theirs + ".weight", n);
  };
  std::vector<Parameter> out = {matrix("attn.qkv", 0, 3),
                                matrix("attn.out", 3, 4),
                                matrix("mlp.gate_up", 4, 6),
                                matrix("mlp.down", 6, 7),
                                norm("attn.norm", "input_layernorm", spec.hidden),
                                norm("mlp.norm", "post_attention_layernorm", spec.hidden)};
  if (spec.qk_norm) {
    out.push_back(norm("attn.q_norm", "self_attn.q_norm", spec.head_dim));
    out.push_back(norm("attn.k_norm", "self_attn.k_norm", spec.head_dim));
  }
  if (spec.qkv_bias) out.push_back(bias("attn.qkv_bias", 0, 3));
  if (spec.o_bias) out.push_back(bias("attn.out_bias", 3, 4));
  if (spec.mlp_bias) {
    out.push_back(bias("mlp.gate_up_bias", 4, 6));
    out.push_back(bias("mlp.down_bias", 6, 7));
  }
  return out;
}

std::vector<Parameter> layer_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  std::vector<Parameter> out;
  for (const Module& module : modules_of(spec)) {
    const auto& targets = adapter.targets;
    if (std::find(targets.begin(), targets.end(), module.name) == targets.end()) continue;
    const std::string ours = "layers." + std::to_string(i) + "." + module.name;
    const std::string hf =
        "base_model.model.model.layers." + std::to_string(i) + "." + module.parent + "." + module.name;
    out.push_back(
        single(ours + ".lora_A", ParameterKind::kLoraA, hf + ".lora_A.weight", adapter.r, module.in));
    out.push_back(
        single(ours + ".lora_B", ParameterKind::kLoraB, hf + ".lora_B.weight", module.out, adapter.r));
  }
  return out;
}

}  // namespace

double AdapterSpec::scale() const {
  const double rank = static_cast<double>(r);
  return rslora ? alpha / std::sqrt(rank) : alpha / rank;
}

std::vector<BlockParameters> list_parameters(const ModelSpec& spec, const AdapterSpec* adapter) {
  std::vector<BlockParameters> blocks;
  auto add = [&](const std::string& name, std::vector<Parameter> base, std::vector<Parameter> adapters) {
    BlockParameters block{.name = name, .trainable = {}, .frozen = {}};
    block.trainable = adapter ? std::move(adapters) : std::move(base);
    if (adapter) block.frozen = std::move(base);
    blocks.push_back(std::move(block));
  };
  add("embedding",
      {single("embed", ParameterKind::kEmbedding, "model.embed_tokens.weight", spec.vocab, spec.hidden)}, {});
  for (int64_t i = 0; i < spec.layers; ++i) {
    add("block " + std::to_string(i), layer_parameters(spec, i),
        adapter ? layer_adapters(spec, *adapter, i) : std::vector<Parameter>{});
  }
  std::vector<Parameter> last;
  if (!spec.tied) {
    last.push_back(single("head", ParameterKind::kMatrix, "lm_head.weight", spec.vocab, spec.hidden));
  }
  last.push_back(single("norm", ParameterKind::kNorm, "model.norm.weight", spec.hidden));
  add("head", std::move(last), {});
  return blocks;
}

std::vector<std::string> hf_names(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    for (const Parameter& parameter : block.trainable) {
      for (const ParameterPart& part : parameter.parts) names.push_back(part.name);
    }
  }
  return names;
}

std::vector<std::string> resolve_targets(const std::vector<std::string>& targets, const std::string& place) {
  // A target names a module by the end of its path, as PEFT matches a list: "q_proj" or "self_attn.q_proj".
  const auto modules = modules_of(ModelSpec{});
  std::array<bool, 7> chosen{};
  auto fail = [&](const std::string& what) {
    throw Error(
        Exit::kConfig,
        {.area = "CONFIG-20",
         .what = what,
         .place = place,
         .next =
             "use \"all-linear\" or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
         .kept = ""});
  };
  for (const std::string& target : targets) {
    bool known = false;
    for (size_t m = 0; m < modules.size(); ++m) {
      const std::string name = modules[m].name;
      if (target != "all-linear" && target != name && target != modules[m].parent + ("." + name)) continue;
      chosen[m] = known = true;
    }
    if (known) continue;
    const bool vocabulary = target == "lm_head" || target == "embed_tokens" || target == "model.embed_tokens";
    fail("target \"" + target.substr(0, 100) +
         (vocabulary ? "\" is not supported: adapters on the vocabulary matrices are not implemented"
                     : "\" is not a linear layer of the model"));
  }
  std::vector<std::string> out;
  for (size_t m = 0; m < modules.size(); ++m) {
    if (chosen[m]) out.push_back(modules[m].name);
  }
  if (out.empty()) fail("the list of targets is empty");
  return out;
}

}  // namespace lm
