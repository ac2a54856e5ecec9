#include "spec/parameter.h"

#include <fmt/format.h>
#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "spec/adapter_parameters.h"
#include "spec/adapter_sites.h"

namespace lm {
namespace {

std::string last_name(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

// What LinearModule::stack begins with.
std::string stack_of(std::string_view path) {
  return path.ends_with(".*") ? std::string(path.substr(0, path.size() - 2)) : "";
}

// LinearModule::name. GPT-2 has attn.c_proj and mlp.c_proj; and a stack of experts' matrices is called
// experts.down_proj (spec/expert_adapters.h).
std::string module_name(const NameMap& names, const ModuleName& module) {
  const std::string last = last_name(module.path);
  if (*names.experts != '\0' && last == "down_proj") return module.path;
  const auto alike = std::ranges::count_if(
      names.modules, [&](const ModuleName& other) { return last_name(other.path) == last; });
  return alike == 1 ? last : module.path;
}

// LinearModule::adapts. In a mixture of experts routers stay as they are, since one that learns alone may
// collapse; pairs of experts are on the matrices of all (spec/expert_adapters.h); and a dense MLP in place of
// experts has the names that PEFT takes for the experts'.
bool adapts(const NameMap& names, const ModuleName& module) {
  const std::string_view first(module.first);
  if (first.starts_with("shared.")) return first != "shared.weight";
  const std::string last = last_name(module.path);
  return !first.starts_with("experts.") && !names_each_expert(names, last);
}

// A name of the files with an expert's number in its place.
std::string numbered(std::string path, int64_t expert) {
  const size_t place = path.find('*');
  return place == std::string::npos ? path : path.replace(place, 1, std::to_string(expert));
}

// The modules of each matrix: they are in the order of the matrices.
std::vector<std::span<const LinearModule>> by_matrix(const std::vector<MatrixSpec>& matrices,
                                                     const std::vector<LinearModule>& modules) {
  std::vector<std::span<const LinearModule>> out;
  auto next = modules.begin();
  for (const MatrixSpec& matrix : matrices) {
    const auto end = std::find_if(next, modules.end(),
                                  [&](const LinearModule& module) { return module.matrix != matrix.name; });
    out.emplace_back(next, end);
    next = end;
  }
  LM_CHECK(next == modules.end(), "a module is of a matrix");
  return out;
}

// A matrix, or its bias: the tensors of its modules, one after another.
Parameter join(const std::string& ours, ParameterKind kind, const std::string& layer,
               const MatrixSpec& matrix, std::span<const LinearModule> modules) {
  const bool bias = kind == ParameterKind::kBias;
  Parameter parameter{.name = ours + matrix.name + (bias ? "_bias" : ""), .kind = kind, .parts = {}};
  if (!bias) parameter.columns = matrix.columns;
  parameter.plain = matrix.plain;
  parameter.expert = matrix.expert;
  for (const LinearModule& module : modules) {
    parameter.parts.push_back({.name = layer + module.path + (bias ? ".bias" : ".weight"),
                               .first = module.first,
                               .rows = module.rows,
                               .transposed = module.transposed && !bias});
    parameter.rows += module.rows;
    if (module.stack.empty()) continue;
    ParameterPart& part = parameter.parts.back();
    part.file = layer + (bias ? module.bias_stack : module.stack);
    part.slice = module.slice;
    part.slices = module.slices;
  }
  return parameter;
}

// What the family's files call a norm of a layer, or another vector of it.
template <class Name>
std::string path_of(const std::vector<Name>& names, std::string_view ours) {
  const auto found = std::ranges::find(names, ours, &Name::ours);
  LM_CHECK(found != names.end(), "the family names no " + std::string(ours));
  return found->path;
}

// A vector of layer `i` that is a whole tensor of the files.
Parameter layer_vector(const ModelSpec& spec, int64_t i, ParameterKind kind, const InnerVector& vector) {
  return single(fmt::format("layers.{}.{}", i, vector.name), kind,
                fmt::format("{}{}.{}", spec.names.layers, i, path_of(spec.names.vectors, vector.name)),
                vector.width);
}

// A norm as the parameter list needs it: what has no weight or bias adds none. `path`: what stands before
// ".weight" in the files.
struct NamedNorm {
  std::string name;  // ours, of its weight
  std::string path;
  int64_t width = 0;
  NormSpec spec = {};
  int64_t own = 0;  // as InnerNorm has it
};
void add_weight(const NamedNorm& norm, std::vector<Parameter>& out) {
  if (!norm.spec.has_weight()) return;
  out.push_back(single(norm.name, ParameterKind::kNorm, norm.path + ".weight", norm.width));
  out.back().parts.front().heads = norm.own;
  if (norm.spec.offset()) out.back().neutral = 0;
}
void add_bias(const NamedNorm& norm, std::vector<Parameter>& out) {
  if (!norm.spec.has_bias()) return;
  out.push_back(single(norm.name + "_bias", ParameterKind::kBias, norm.path + ".bias", norm.width));
}

// Of layer `i`: those before and behind the mixers, then those inside them.
std::vector<NamedNorm> layer_norms(const ModelSpec& spec, int64_t i) {
  const std::string ours = fmt::format("layers.{}.", i);
  const std::string hf = fmt::format("{}{}.", spec.names.layers, i);
  std::vector<NamedNorm> out;
  const auto add = [&](const std::string& name, int64_t width, const NormSpec& norm, int64_t own = 0) {
    // What has no parameters has no name in the files either.
    if (!norm.has_weight() && !norm.has_bias()) return;
    out.push_back({ours + name, hf + path_of(spec.names.norms, name), width, norm, own});
  };
  for (const SublayerSpec& sublayer : spec.layer(i).sublayers) {
    if (sublayer.norm) add(sublayer.norm_name(), spec.hidden, *sublayer.norm);
    if (sublayer.norm_after) add(sublayer.norm_after_name(), spec.hidden, *sublayer.norm_after);
    if (sublayer.norm_joined) add(sublayer.norm_joined_name(), spec.hidden, *sublayer.norm_joined);
  }
  for (const SublayerSpec& sublayer : spec.layer(i).sublayers)
    for (const InnerNorm& inner : mixer_parameters(sublayer.mixer, spec.hidden).norms)
      add(inner.name, inner.width, inner.spec, inner.own);
  return out;
}

// The base model's parameters of layer `i` that are trained: matrices, norms, biases.
std::vector<Parameter> layer_parameters(const ModelSpec& spec, int64_t i) {
  const std::string ours = fmt::format("layers.{}.", i);
  const std::string hf = fmt::format("{}{}.", spec.names.layers, i);
  const std::vector<LinearModule> modules = linear_modules(spec, i);
  const std::vector<MatrixSpec> matrices = layer_matrices(spec, i);
  const std::vector<std::span<const LinearModule>> of = by_matrix(matrices, modules);
  const std::vector<NamedNorm> norms = layer_norms(spec, i);
  std::vector<Parameter> out;
  for (size_t m = 0; m < matrices.size(); ++m)
    out.push_back(join(ours, ParameterKind::kMatrix, hf, matrices[m], of[m]));
  for (const NamedNorm& norm : norms) add_weight(norm, out);
  for (const SublayerSpec& sublayer : spec.layer(i).sublayers) {
    const MixerParameters mixer = mixer_parameters(sublayer.mixer, spec.hidden);
    for (const InnerVector& sinks : mixer.sinks)
      out.push_back(layer_vector(spec, i, ParameterKind::kSinks, sinks));
    for (const InnerVector& factors : mixer.factors)
      out.push_back(layer_vector(spec, i, ParameterKind::kFactors, factors));
  }
  for (size_t m = 0; m < matrices.size(); ++m)
    if (matrices[m].bias) out.push_back(join(ours, ParameterKind::kBias, hf, matrices[m], of[m]));
  for (const NamedNorm& norm : norms) add_bias(norm, out);
  return out;
}

// Of what the embedding stage makes for the layers.
void add_inputs(const ModelSpec& spec, std::vector<Parameter>& out) {
  const InputsSpec& inputs = spec.embedding.inputs;
  if (inputs.width == 0) return;
  const auto weight = [](const char* path) { return path + std::string(".weight"); };
  out.push_back(single("inputs.table", ParameterKind::kEmbedding, weight(spec.names.input_table),
                       inputs.vocab, inputs.all()));
  out.push_back(single("inputs.projection", ParameterKind::kMatrix, weight(spec.names.input_projection),
                       inputs.all(), spec.hidden));
  add_weight({"inputs.norm", spec.names.input_norm, inputs.width, inputs.norm}, out);
}

std::vector<Parameter> layer_buffers(const ModelSpec& spec, int64_t i) {
  std::vector<Parameter> out;
  if (spec.layer(i).scalar) out.push_back(layer_vector(spec, i, ParameterKind::kBuffer, {"scalar", 1}));
  for (const SublayerSpec& sublayer : spec.layer(i).sublayers) {
    for (const InnerVector& buffer : mixer_parameters(sublayer.mixer, spec.hidden).buffers) {
      out.push_back(layer_vector(spec, i, ParameterKind::kBuffer, buffer));
      out.back().neutral = 0;
      out.back().fp32 = true;
    }
  }
  return out;
}

}  // namespace

bool names_each_expert(const NameMap& names, std::string_view last) {
  return std::ranges::any_of(names.modules, [&](const ModuleName& module) {
    if (std::ranges::find(module.each, last) != module.each.end()) return true;
    return std::string_view(module.path).find("*.") != std::string_view::npos &&
           last_name(module.path) == last;
  });
}

const AttentionSpec* common_attention(const ModelSpec& spec) {
  const AttentionSpec* first = nullptr;
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* const one = layer.find<AttentionSpec>();
    if (one == nullptr || one->borrows()) return nullptr;
    if (first == nullptr) first = one;
    if (one->kv_heads != first->kv_heads || one->head_dim != first->head_dim) return nullptr;
  }
  return first;
}

PromptShape prompt_shape(const ModelSpec& spec, AdapterKind kind) {
  if (kind == AdapterKind::kPrefix) {
    const AttentionSpec* const common = common_attention(spec);
    return common == nullptr ? PromptShape()
                             : PromptShape{common->kv_rows(), common->kv_heads, spec.layer_count()};
  }
  PromptShape out{.token_dim = spec.hidden, .layers = spec.layer_count()};
  for (const LayerSpec& layer : spec.layers) {
    if (const AttentionSpec* const attention = layer.find<AttentionSpec>()) out.heads = attention->heads;
    if (out.heads > 0) break;
  }
  return out;
}

std::string virtual_token_mistake(const ModelSpec& spec, AdapterKind kind) {
  if (spec.scores()) return "virtual tokens beside a head of scores are not implemented";
  if (kind == AdapterKind::kPrefix && common_attention(spec) == nullptr)
    return "its layers have keys of different sizes, or share them, and a prefix has one size for all";
  if (kind == AdapterKind::kPrompt && spec.embedding.inputs.width > 0)
    return "its layers read tokens' embeddings of their own, which virtual tokens do not have";
  return "";
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
        const std::string stack = stack_of(name->path);
        out.push_back({.path = numbered(name->path, matrix.expert),
                       .name = numbered(module_name(spec.names, *name), matrix.expert),
                       .matrix = matrix.name,
                       .part = part,
                       .first = row,
                       .columns = matrix.columns,
                       .transposed = name->transposed,
                       .adapts = adapts(spec.names, *name),
                       .stack = stack.empty() ? stack : stack + name->weight,
                       .bias_stack = stack.empty() ? stack : stack + name->bias,
                       .slice = stack.empty() ? 0 : matrix.expert,
                       .slices = stack.empty() ? 0 : matrix.experts});
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
  // The base model's tensors are trained or, beside adapters, frozen but for those that are trained whole;
  // `others` always are frozen.
  auto add = [&](const std::string& name, std::vector<Parameter> base, std::vector<Parameter> adapters,
                 std::vector<Parameter> others) {
    BlockParameters block{.name = name, .trainable = {}, .frozen = {}};
    if (adapter == nullptr) {
      block.trainable = std::move(base);
    } else {
      split_base(spec, *adapter, std::move(base), std::move(adapters), block);
    }
    std::ranges::move(others, std::back_inserter(block.frozen));
    blocks.push_back(std::move(block));
  };
  std::vector<Parameter> first = {
      single("embed", ParameterKind::kEmbedding, weight(names.embedding), spec.vocab, spec.hidden)};
  if (spec.embedding.positions > 0) {
    first.push_back(single("positions", ParameterKind::kEmbedding, weight(names.positions),
                           spec.embedding.positions, spec.hidden));
  }
  add_inputs(spec, first);
  add("embedding", std::move(first), embedding_adapters(spec, adapter), {});
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    std::vector<Parameter> base = layer_parameters(spec, i);
    std::vector<Parameter> adapters = block_adapters(spec, adapter, i, base);
    std::vector<Parameter> others = block_starts(spec, adapter, i);
    std::ranges::move(layer_buffers(spec, i), std::back_inserter(others));
    add(fmt::format("block {}", i), std::move(base), std::move(adapters), std::move(others));
  }
  std::vector<Parameter> last;
  if (!spec.tied)
    last.push_back(single("head", ParameterKind::kMatrix, weight(names.head), spec.head_rows(), spec.hidden));
  const NamedNorm norm{"norm", names.norm, spec.hidden, spec.final_norm};
  add_weight(norm, last);
  add_bias(norm, last);
  std::vector<Parameter> adapters = block_adapters(spec, adapter, kNoLayer, last);
  add("head", std::move(last), std::move(adapters), {});
  return blocks;
}

std::vector<std::string> resolve_targets(const NameMap& names, const std::vector<std::string>& targets,
                                         const std::string& place) {
  // A target names modules by the end of their paths, as PEFT matches a list: "q_proj" or "self_attn.q_proj".
  std::vector<bool> chosen(names.modules.size());
  auto fail = [&](const std::string& what) {
    std::string next = "use \"all-linear\" or some of";
    const char* before = " ";
    for (const ModuleName& module : names.modules) {
      if (!adapts(names, module)) continue;
      next += before + module_name(names, module);
      before = ", ";
    }
    throw Error(Exit::kConfig, {.area = "CONF-20", .what = what, .place = place, .next = next});
  };
  for (const std::string& target : targets) {
    bool known = false, experts = false, each = false;  // each: of every expert
    for (size_t m = 0; m < names.modules.size(); ++m) {
      const std::string stack = stack_of(names.modules[m].path);
      const std::string path = stack.empty() ? names.modules[m].path : stack;
      if (target != "all-linear" && target != last_name(path) && target != path) continue;
      if (!adapts(names, names.modules[m])) {
        experts = true;
        each = each || stack.empty();
        continue;
      }
      chosen[m] = known = true;
    }
    // Of a name that each expert's module has, too, the others alone would be less than was asked for. What
    // holds the matrices of all is no module.
    if (known && (!each || target == "all-linear")) continue;
    const bool vocabulary =
        !target.empty() &&
        (target == names.head || target == names.embedding || target == last_name(names.embedding) ||
         target == names.positions || target == last_name(names.positions));
    std::string why = "\" is not a linear layer of the model";
    if (experts) {
      why = "\" is not supported: a router has no adapter, and an expert has none without the others";
      if (*names.experts != '\0') why += "; lora.experts = true adapts all experts";
    }
    if (vocabulary)
      why =
          "\" is not supported: an embedding and a head that is tied to it get no adapter, since the two are "
          "one matrix, and an adapter's change would be the lookups' or the logits' alone (lora.also and "
          "lora.tokens train both)";
    fail("target \"" + target.substr(0, 100) + why);
  }
  std::vector<std::string> out;
  for (size_t m = 0; m < names.modules.size(); ++m) {
    if (chosen[m]) out.push_back(module_name(names, names.modules[m]));
  }
  if (out.empty()) fail("the list of targets is empty");
  return out;
}

}  // namespace lm
