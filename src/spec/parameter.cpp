#include "spec/parameter.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

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

Projection projection_of(LinearPart part) {
  if (part <= LinearPart::kV) return Projection::kQkv;
  if (part == LinearPart::kOut) return Projection::kOut;
  return part == LinearPart::kDown ? Projection::kDown : Projection::kGateUp;
}

int64_t columns_of(const ModelSpec& spec, Projection projection) {
  if (projection == Projection::kOut) return spec.q_rows();
  return projection == Projection::kDown ? spec.ffn : spec.hidden;
}

std::string last_name(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

Parameter single(const std::string& name, ParameterKind kind, const std::string& hf, int64_t rows,
                 int64_t columns = 1) {
  return {.name = name, .kind = kind, .rows = rows, .columns = columns, .parts = {{hf, 0, rows}}};
}

// A projection, or its bias: the tensors `suffix` of its modules, one after another.
Parameter join(const std::string& ours, ParameterKind kind, const std::string& layer,
               const std::vector<LinearModule>& modules, Projection projection) {
  const bool bias = kind == ParameterKind::kBias;
  Parameter parameter{
      .name = ours + projection_name(projection) + (bias ? "_bias" : ""), .kind = kind, .parts = {}};
  for (const LinearModule& module : modules) {
    if (module.projection != projection) continue;
    parameter.parts.push_back(
        {layer + module.path + (bias ? ".bias" : ".weight"), module.first, module.rows});
    parameter.rows += module.rows;
    if (!bias) parameter.columns = module.columns;
  }
  return parameter;
}

// The base model's parameters of layer `i`: matrices, norms, biases.
std::vector<Parameter> layer_parameters(const ModelSpec& spec, int64_t i) {
  using enum Projection;
  const LayerSpec& layer = spec.layer(i);
  const NameMap& names = spec.names;
  const std::string ours = fmt::format("layers.{}.", i);
  const std::string hf = fmt::format("{}{}.", names.layers, i);
  const std::vector<LinearModule> modules = linear_modules(spec);
  auto matrix = [&](Projection which) { return join(ours, ParameterKind::kMatrix, hf, modules, which); };
  auto bias = [&](Projection which) { return join(ours, ParameterKind::kBias, hf, modules, which); };
  auto norm = [&](const char* name, const char* theirs, int64_t n) {
    return single(ours + name, ParameterKind::kNorm, hf + theirs + ".weight", n);
  };
  std::vector<Parameter> out = {matrix(kQkv), matrix(kOut)};
  switch (layer.mlp) {
    case MlpKind::kSwiGlu:
      out.push_back(matrix(kGateUp));
      out.push_back(matrix(kDown));
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
  if (layer.qkv_bias) out.push_back(bias(kQkv));
  if (layer.o_bias) out.push_back(bias(kOut));
  if (layer.mlp_bias) {
    out.push_back(bias(kGateUp));
    out.push_back(bias(kDown));
  }
  return out;
}

std::vector<Parameter> layer_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  std::vector<Parameter> out;
  for (const LinearModule& module : linear_modules(spec)) {
    const auto& targets = adapter.targets;
    if (std::find(targets.begin(), targets.end(), module.name) == targets.end()) continue;
    const std::string ours = fmt::format("layers.{}.{}", i, module.name);
    const std::string hf = fmt::format("{}{}.{}", spec.names.layers, i, module.path);
    const auto add = [&](TrainableRole role, const char* name, int64_t rows, int64_t columns) {
      out.push_back(single(ours + name, ParameterKind::kMatrix, "base_model.model." + hf + name + ".weight",
                           rows, columns));
      out.back().role = role;
      out.back().owner = hf + ".weight";
    };
    add(TrainableRole::kLoraA, ".lora_A", adapter.r, module.columns);
    add(TrainableRole::kLoraB, ".lora_B", module.rows, adapter.r);
  }
  return out;
}

}  // namespace

double AdapterSpec::scale() const {
  const double rank = static_cast<double>(r);
  return rslora ? alpha / std::sqrt(rank) : alpha / rank;
}

const char* projection_name(Projection projection) {
  constexpr const char* kNames[] = {"attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"};
  return kNames[static_cast<size_t>(projection)];
}

std::vector<LinearModule> linear_modules(const ModelSpec& spec) {
  std::vector<LinearModule> out;
  for (const ModuleName& name : spec.names.modules) {
    LinearModule module{.path = name.path,
                        .name = last_name(name.path),
                        .part = name.first,
                        .projection = projection_of(name.first)};
    module.columns = columns_of(spec, module.projection);
    if (!out.empty() && out.back().projection == module.projection)
      module.first = out.back().first + out.back().rows;
    for (int part = static_cast<int>(name.first); part <= static_cast<int>(name.last); ++part)
      module.rows += rows_of(spec, static_cast<LinearPart>(part));
    out.push_back(std::move(module));
  }
  return out;
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
    add(fmt::format("block {}", i), layer_parameters(spec, i),
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

std::vector<std::string> resolve_targets(const NameMap& names, const std::vector<std::string>& targets,
                                         const std::string& place) {
  // A target names a module by the end of its path, as PEFT matches a list: "q_proj" or "self_attn.q_proj".
  std::vector<bool> chosen(names.modules.size());
  auto fail = [&](const std::string& what) {
    std::string next = "use \"all-linear\" or some of";
    for (const ModuleName& module : names.modules)
      next += (&module == &names.modules.front() ? " " : ", ") + last_name(module.path);
    throw Error(Exit::kConfig, {.area = "CONF-20", .what = what, .place = place, .next = next});
  };
  for (const std::string& target : targets) {
    bool known = false;
    for (size_t m = 0; m < names.modules.size(); ++m) {
      const std::string path = names.modules[m].path;
      if (target != "all-linear" && target != last_name(path) && target != path) continue;
      chosen[m] = known = true;
    }
    if (known) continue;
    const bool vocabulary = target == "lm_head" || target == "embed_tokens" || target == "model.embed_tokens";
    fail("target \"" + target.substr(0, 100) +
         (vocabulary ? "\" is not supported: adapters on the vocabulary matrices are not implemented"
                     : "\" is not a linear layer of the model"));
  }
  std::vector<std::string> out;
  for (size_t m = 0; m < names.modules.size(); ++m) {
    if (chosen[m]) out.push_back(last_name(names.modules[m].path));
  }
  if (out.empty()) fail("the list of targets is empty");
  return out;
}

}  // namespace lm
