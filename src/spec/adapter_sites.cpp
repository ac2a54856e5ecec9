#include "spec/adapter_sites.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "spec/expert_adapters.h"

namespace lm {
namespace {

template <class T>
T value_of(const std::vector<std::pair<std::string, T>>& values, std::string_view path, T other) {
  for (const auto& [name, value] : values)
    if (names_module(name, path)) return value;
  return other;
}

struct Defaults {
  std::string_view model_type;
  std::vector<std::string> ia3, norms;
};
const std::vector<std::string> kKeyValue = {"k_proj", "v_proj", "down_proj"},
                               kQueryValue = {"q_proj", "v_proj", "down_proj"},
                               kThree = {"input_layernorm", "post_attention_layernorm", "norm"},
                               kFive = {"input_layernorm", "post_attention_layernorm",
                                        "pre_feedforward_layernorm", "post_feedforward_layernorm", "norm"},
                               kOne = {"post_attention_layernorm"};
const Defaults kDefaults[] = {
    {"llama", kKeyValue, kThree},        {"mistral", kKeyValue, kThree},
    {"gemma", kQueryValue, kThree},      {"gemma2", kQueryValue, kFive},
    {"gemma3_text", kQueryValue, kFive}, {"qwen2", kQueryValue, kOne},
    {"qwen3", kQueryValue, kOne},        {"gpt2", {"c_attn", "mlp.c_proj"}, {"ln_1", "ln_2", "ln_f"}}};

// The sites of the modules with one name.
struct SameName {
  std::string name;
  std::vector<AdapterSite> sites;
  std::vector<int64_t> layers, all;  // that have a site; that have the module
};

std::vector<SameName> by_name(const std::vector<AdapterModule>& modules,
                              const std::vector<AdapterSite>& sites) {
  std::vector<SameName> out;
  size_t next = 0;  // of the sites
  for (size_t m = 0; m < modules.size(); ++m) {
    auto same = std::find_if(out.begin(), out.end(),
                             [&](const SameName& one) { return one.name == modules[m].name; });
    if (same == out.end()) same = out.insert(out.end(), SameName{modules[m].name, {}, {}, {}});
    same->all.push_back(modules[m].layer);
    if (next == sites.size() || sites[next].module != m) continue;
    same->layers.push_back(modules[m].layer);
    same->sites.push_back(sites[next++]);
  }
  LM_CHECK(next == sites.size(), "sites in the order of the modules");
  std::erase_if(out, [](const SameName& one) { return one.sites.empty(); });
  return out;
}

// The layers in which all of these names have their sites: empty if that is every layer. False: there is no
// such set.
bool common_layers(const std::vector<SameName>& names, std::vector<int64_t>& out) {
  if (std::all_of(names.begin(), names.end(), [](const SameName& one) { return one.layers == one.all; }))
    return true;
  for (const SameName& one : names) out.insert(out.end(), one.layers.begin(), one.layers.end());
  std::erase(out, kNoLayer);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return std::all_of(names.begin(), names.end(), [&](const SameName& one) {
    if (one.all.front() == kNoLayer) return true;
    std::vector<int64_t> expected;
    std::set_intersection(one.all.begin(), one.all.end(), out.begin(), out.end(),
                          std::back_inserter(expected));
    return expected == one.layers;
  });
}

// The values that differ from `other`, which becomes the value of all sites if they have one.
template <class T>
std::vector<std::pair<std::string, T>> differing(const std::vector<AdapterModule>& modules,
                                                 const std::vector<SameName>& names, T AdapterSite::*field,
                                                 T& other) {
  const auto one_value = [&](const std::vector<AdapterSite>& sites) {
    return std::all_of(sites.begin(), sites.end(),
                       [&](const AdapterSite& site) { return site.*field == sites.front().*field; });
  };
  std::vector<AdapterSite> all;
  for (const SameName& one : names) all.insert(all.end(), one.sites.begin(), one.sites.end());
  std::vector<std::pair<std::string, T>> out;
  if (one_value(all)) {
    other = all.front().*field;
    return out;
  }
  for (const SameName& one : names) {
    if (one_value(one.sites)) {
      if (one.sites.front().*field != other) out.emplace_back(one.name, one.sites.front().*field);
      continue;
    }
    for (const AdapterSite& site : one.sites)
      if (site.*field != other) out.emplace_back(modules[site.module].path, site.*field);
  }
  return out;
}

}  // namespace

bool names_module(std::string_view name, std::string_view path) {
  if (name.empty() || !path.ends_with(name)) return false;
  return path.size() == name.size() || path[path.size() - name.size() - 1] == '.';
}

std::string_view module_of(std::string_view weight) {
  constexpr std::string_view kEnd = ".weight";
  return weight.ends_with(kEnd) ? weight.substr(0, weight.size() - kEnd.size()) : weight;
}

bool AdapterSpec::adapts(int64_t layer, std::string_view path) const {
  const bool here =
      layers.empty() || layer == kNoLayer || std::find(layers.begin(), layers.end(), layer) != layers.end();
  return std::any_of(targets.begin(), targets.end(), [&](const std::string& target) {
    return target == path || (here && names_module(target, path));
  });
}

int64_t AdapterSpec::rank_of(std::string_view path) const {
  return value_of(ranks, path, r);
}

double AdapterSpec::alpha_of(std::string_view path) const {
  return value_of(alphas, path, alpha);
}

double AdapterSpec::scale_of(std::string_view path) const {
  const auto rank = static_cast<double>(rank_of(path));
  return alpha_of(path) / (rslora ? std::sqrt(rank) : rank);
}

double AdapterSpec::scale() const {
  const auto rank = static_cast<double>(r);
  return alpha / (rslora ? std::sqrt(rank) : rank);
}

std::vector<AdapterModule> adapter_modules(const ModelSpec& spec) {
  std::vector<AdapterModule> out;
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    for (const LinearModule& module : linear_modules(spec, i)) {
      if (!module.adapts) continue;
      out.push_back(
          {i, module.name, fmt::format("{}{}.{}", spec.names.layers, i, module.path), module.feedforward()});
    }
  }
  return out;
}

std::vector<AdapterModule> lora_modules(const ModelSpec& spec) {
  std::vector<AdapterModule> out = adapter_modules(spec);
  const auto add = [&](const std::string& path) {
    out.push_back({kNoLayer, path.substr(path.rfind('.') + 1), path});
  };
  if (!spec.tied) add(spec.names.embedding);
  if (!spec.tied && !spec.scores()) add(spec.names.head);
  for (int64_t i = 0; i < spec.layer_count(); ++i)
    for (const ExpertStack& stack : expert_stacks(spec, i))
      out.push_back({.layer = i, .name = stack.name, .path = stack.path, .stacked = true});
  return out;
}

bool peft_takes_for_experts(const ModelSpec& spec, const AdapterModule& module) {
  if (module.stacked || spec.model_type == "qwen2_moe") return false;
  return *spec.names.experts != '\0' &&
         names_each_expert(spec.names, module.path.substr(module.path.rfind('.') + 1));
}

std::vector<AdapterModule> norm_modules(const ModelSpec& spec) {
  std::vector<AdapterModule> out;
  const std::vector<BlockParameters> blocks = list_parameters(spec, nullptr);
  for (size_t b = 1; b < blocks.size(); ++b) {
    for (const Parameter& parameter : blocks[b].trainable) {
      if (parameter.kind != ParameterKind::kNorm) continue;
      const std::string path(module_of(parameter.parts.front().name));
      out.push_back({static_cast<int64_t>(b) - 1, path.substr(path.rfind('.') + 1), path});
    }
  }
  return out;
}

std::vector<std::string> default_targets(const ModelSpec& spec, AdapterKind kind) {
  if (kind == AdapterKind::kLora) return {"all-linear"};
  const auto found = std::find_if(std::begin(kDefaults), std::end(kDefaults),
                                  [&](const Defaults& one) { return one.model_type == spec.model_type; });
  if (found == std::end(kDefaults)) return {};
  return kind == AdapterKind::kIa3 ? found->ia3 : found->norms;
}

std::vector<std::string> shortest_targets(const std::vector<AdapterModule>& modules,
                                          const std::vector<bool>& chosen) {
  std::vector<std::string> out;
  for (size_t m = 0; m < modules.size(); ++m) {
    if (!chosen[m]) continue;
    bool all = true;
    for (size_t other = 0; other < modules.size(); ++other)
      all = all && (modules[other].name != modules[m].name || chosen[other]);
    const std::string& target = all ? modules[m].name : modules[m].path;
    if (std::find(out.begin(), out.end(), target) == out.end()) out.push_back(target);
  }
  return out;
}

std::vector<AdapterSite> list_sites(const std::vector<AdapterModule>& modules, const AdapterSpec& adapter) {
  std::vector<AdapterSite> out;
  for (size_t m = 0; m < modules.size(); ++m) {
    const std::string& path = modules[m].path;
    if (!adapter.adapts(modules[m].layer, path)) continue;
    out.push_back({m, adapter.rank_of(path), adapter.alpha_of(path)});
  }
  return out;
}

void set_sites(const std::vector<AdapterModule>& modules, const std::vector<AdapterSite>& sites,
               AdapterSpec& adapter) {
  LM_CHECK(!sites.empty(), "an adapter has at least one module");
  const std::vector<SameName> names = by_name(modules, sites);
  adapter.targets.clear();
  adapter.layers.clear();
  if (common_layers(names, adapter.layers)) {
    for (const SameName& one : names) adapter.targets.push_back(one.name);
  } else {
    adapter.layers.clear();
    for (const AdapterSite& site : sites) adapter.targets.push_back(modules[site.module].path);
  }
  adapter.ranks = differing(modules, names, &AdapterSite::r, adapter.r);
  adapter.alphas = differing(modules, names, &AdapterSite::alpha, adapter.alpha);
}

}  // namespace lm
