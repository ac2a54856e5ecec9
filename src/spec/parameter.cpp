#include "spec/parameter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// A linear layer of the family's files with its shape; in block order.
struct Module {
  ModuleName name;
  std::string leaf;  // "q_proj"
  int64_t out = 0;
  int64_t in = 0;
};

int64_t rows_of(const ModelSpec& spec, LinearPart part) {
  switch (part) {
    case LinearPart::kQ:
      return spec.q_rows();
    case LinearPart::kK:
    case LinearPart::kV:
      return spec.kv_rows();
    case LinearPart::kOut:
    case LinearPart::kDown:
      return spec.hidden;
    case LinearPart::kGate:
    case LinearPart::kUp:
      return spec.ffn;
  }
  return 0;
}

std::vector<Module> modules_of(const ModelSpec& spec) {
  std::vector<Module> out;
  for (const ModuleName& name : spec.names.modules) {
    const std::string path = name.path;
    Module module{.name = name, .leaf = path.substr(path.rfind('.') + 1)};
    for (int part = static_cast<int>(name.first); part <= static_cast<int>(name.last); ++part) {
      module.out += rows_of(spec, static_cast<LinearPart>(part));
    }
    module.in = name.first == LinearPart::kOut    ? spec.q_rows()
                : name.first == LinearPart::kDown ? spec.ffn
                                                  : spec.hidden;
    out.push_back(std::move(module));
  }
  return out;
}

// A projection, or its bias: the tensors `suffix` of the modules of parts [first, last], one after another.
Parameter join(const std::string& name, ParameterKind kind, const std::string& layer,
               const std::vector<Module>& modules, LinearPart first, LinearPart last, const char* suffix) {
  Parameter parameter{.name = name, .kind = kind, .rows = 0, .columns = 1, .parts = {}};
  for (const Module& module : modules) {
    if (module.name.first < first || module.name.first > last) continue;
    parameter.parts.push_back({layer + module.name.path + suffix, parameter.rows, module.out});
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
  using enum LinearPart;
  const LayerSpec& layer = spec.layer(i);
  const NameMap& names = spec.names;
  const std::string ours = "layers." + std::to_string(i) + ".";
  const std::string hf = names.layers + std::to_string(i) + ".";
  const std::vector<Module> modules = modules_of(spec);
  auto matrix = [&](const char* name, LinearPart first, LinearPart last) {
    return join(ours + name, ParameterKind::kMatrix, hf, modules, first, last, ".weight");
  };
  auto bias = [&](const char* name, LinearPart first, LinearPart last) {
    return join(ours + name, ParameterKind::kBias, hf, modules, first, last, ".bias");
  };
  auto norm = [&](const char* name, const char* theirs, int64_t n) {
    return single(ours + name, ParameterKind::kNorm, hf + theirs + ".weight", n);
  };
  std::vector<Parameter> out = {matrix("attn.qkv", kQ, kV), matrix("attn.out", kOut, kOut)};
  switch (layer.mlp) {
    case MlpKind::kSwiGlu:
      out.push_back(matrix("mlp.gate_up", kGate, kUp));
      out.push_back(matrix("mlp.down", kDown, kDown));
  }
  switch (layer.norm) {
    case NormKind::kRms:
      out.push_back(norm("attn.norm", names.attention_norm, spec.hidden));
      out.push_back(norm("mlp.norm", names.mlp_norm, spec.hidden));
  }
  if (layer.qk_norm()) {
    out.push_back(norm("attn.q_norm", names.q_norm, spec.head_dim));
    out.push_back(norm("attn.k_norm", names.k_norm, spec.head_dim));
  }
  if (layer.qkv_bias) out.push_back(bias("attn.qkv_bias", kQ, kV));
  if (layer.o_bias) out.push_back(bias("attn.out_bias", kOut, kOut));
  if (layer.mlp_bias) {
    out.push_back(bias("mlp.gate_up_bias", kGate, kUp));
    out.push_back(bias("mlp.down_bias", kDown, kDown));
  }
  return out;
}

std::vector<Parameter> layer_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  std::vector<Parameter> out;
  for (const Module& module : modules_of(spec)) {
    const auto& targets = adapter.targets;
    if (std::find(targets.begin(), targets.end(), module.leaf) == targets.end()) continue;
    const std::string ours = "layers." + std::to_string(i) + "." + module.leaf;
    const std::string hf =
        std::string("base_model.model.") + spec.names.layers + std::to_string(i) + "." + module.name.path;
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
  const NameMap& names = spec.names;
  const auto weight = [](const char* path) { return path + std::string(".weight"); };
  auto add = [&](const std::string& name, std::vector<Parameter> base, std::vector<Parameter> adapters) {
    BlockParameters block{.name = name, .trainable = {}, .frozen = {}};
    block.trainable = adapter ? std::move(adapters) : std::move(base);
    if (adapter) block.frozen = std::move(base);
    blocks.push_back(std::move(block));
  };
  add("embedding",
      {single("embed", ParameterKind::kEmbedding, weight(names.embedding), spec.vocab, spec.hidden)}, {});
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    add("block " + std::to_string(i), layer_parameters(spec, i),
        adapter ? layer_adapters(spec, *adapter, i) : std::vector<Parameter>{});
  }
  std::vector<Parameter> last;
  if (!spec.tied) {
    last.push_back(single("head", ParameterKind::kMatrix, weight(names.head), spec.vocab, spec.hidden));
  }
  last.push_back(single("norm", ParameterKind::kNorm, weight(names.norm), spec.hidden));
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
  std::vector<bool> chosen(modules.size());
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
      if (target != "all-linear" && target != modules[m].leaf && target != modules[m].name.path) continue;
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
    if (chosen[m]) out.push_back(modules[m].leaf);
  }
  if (out.empty()) fail("the list of targets is empty");
  return out;
}

}  // namespace lm
