#include "spec/parameter.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

std::string last_name(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

Parameter single(const std::string& name, ParameterKind kind, const std::string& hf, int64_t rows,
                 int64_t columns = 1) {
  return {.name = name, .kind = kind, .rows = rows, .columns = columns, .parts = {{hf, 0, rows}}};
}

// A matrix, or its bias: the tensors of its modules, one after another.
Parameter join(const std::string& ours, ParameterKind kind, const std::string& layer,
               const MatrixSpec& matrix, const std::vector<LinearModule>& modules) {
  const bool bias = kind == ParameterKind::kBias;
  Parameter parameter{.name = ours + matrix.name + (bias ? "_bias" : ""), .kind = kind, .parts = {}};
  if (!bias) parameter.columns = matrix.columns;
  for (const LinearModule& module : modules) {
    if (module.matrix != matrix.name) continue;
    parameter.parts.push_back(
        {layer + module.path + (bias ? ".bias" : ".weight"), module.first, module.rows});
    parameter.rows += module.rows;
  }
  return parameter;
}

// What the family's files call a norm of a layer.
std::string norm_path(const NameMap& names, std::string_view ours) {
  const auto found = std::ranges::find(names.norms, ours, &NormName::ours);
  LM_CHECK(found != names.norms.end(), "the family names no " + std::string(ours));
  return found->path;
}

// The base model's parameters of layer `i`: matrices, norms, biases.
std::vector<Parameter> layer_parameters(const ModelSpec& spec, int64_t i) {
  const std::string ours = fmt::format("layers.{}.", i);
  const std::string hf = fmt::format("{}{}.", spec.names.layers, i);
  const std::vector<LinearModule> modules = linear_modules(spec, i);
  const std::vector<MatrixSpec> matrices = layer_matrices(spec, i);
  std::vector<Parameter> out;
  const auto norm = [&](const std::string& name, int64_t width) {
    out.push_back(
        single(ours + name, ParameterKind::kNorm, hf + norm_path(spec.names, name) + ".weight", width));
  };
  for (const MatrixSpec& matrix : matrices)
    out.push_back(join(ours, ParameterKind::kMatrix, hf, matrix, modules));
  for (const SublayerSpec& sublayer : spec.layer(i).sublayers) {
    if (sublayer.norm) norm(sublayer.norm_name(), spec.hidden);
    if (sublayer.norm_after) norm(sublayer.norm_after_name(), spec.hidden);
  }
  for (const SublayerSpec& sublayer : spec.layer(i).sublayers)
    for (const NormWeight& inner : mixer_parameters(sublayer.mixer, spec.hidden).norms)
      norm(inner.name, inner.width);
  for (const MatrixSpec& matrix : matrices)
    if (matrix.bias) out.push_back(join(ours, ParameterKind::kBias, hf, matrix, modules));
  return out;
}

std::vector<Parameter> layer_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  std::vector<Parameter> out;
  for (const LinearModule& module : linear_modules(spec, i)) {
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

std::vector<MatrixSpec> layer_matrices(const ModelSpec& spec, int64_t layer) {
  std::vector<MatrixSpec> out;
  for (const SublayerSpec& sublayer : spec.layer(layer).sublayers)
    for (MatrixSpec& matrix : mixer_parameters(sublayer.mixer, spec.hidden).matrices)
      out.push_back(std::move(matrix));
  return out;
}

std::vector<LinearModule> linear_modules(const ModelSpec& spec, int64_t layer) {
  std::vector<LinearModule> out;
  int64_t part = 0;
  const char* last = nullptr;  // of the module that the next part joins; null: the part begins one
  for (const MatrixSpec& matrix : layer_matrices(spec, layer)) {
    int64_t row = 0;
    for (const MatrixSpec::Part& one : matrix.parts) {
      if (last == nullptr) {
        const auto name =
            std::ranges::find(spec.names.modules, std::string_view(one.name), &ModuleName::first);
        LM_CHECK(name != spec.names.modules.end(), "the family names no " + std::string(one.name));
        out.push_back({.path = name->path,
                       .name = last_name(name->path),
                       .matrix = matrix.name,
                       .part = part,
                       .first = row,
                       .columns = matrix.columns});
        last = name->last != nullptr ? name->last : name->first;
      }
      out.back().rows += one.rows;
      if (std::string_view(one.name) == last) last = nullptr;
      row += one.rows;
      ++part;
    }
    LM_CHECK(last == nullptr, "a module of the files is part of one matrix");
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
