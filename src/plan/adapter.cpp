#include "plan/adapter.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/name_pattern.h"
#include "config/config_text.h"
#include "plan/adapter_limits.h"
#include "plan/name_hint.h"
#include "spec/adapter_sites.h"
#include "spec/expert_adapters.h"
#include "spec/whole_modules.h"

namespace lm {
namespace {

bool written(const LoraConfig& lora, const char* key) {
  return std::find(lora.written.begin(), lora.written.end(), key) != lora.written.end();
}

// Modules by the end of their paths, "all-linear", or "regex:" and an expression that is found in the path.
class ModulePattern {
 public:
  explicit ModulePattern(const std::string& text) : text_(text) {
    if (text.starts_with(NamePattern::kRegex)) regex_.emplace(text);
  }
  bool matches(const AdapterModule& module) const {
    if (regex_) return regex_->matches(module.path);
    // As peft has it, "all-linear" leaves the head and the experts out.
    return (is_all_linear() && module.layer != kNoLayer && !module.stacked) ||
           names_module(text_, module.path);
  }
  bool is_all_linear() const { return text_ == "all-linear"; }
  bool is_regex() const { return regex_.has_value(); }

 private:
  std::string text_;
  std::optional<NamePattern> regex_;
};

// `key` has a name that is in no path of `modules`.
Error matches_nothing(const char* key, const std::string& text, const std::vector<AdapterModule>& modules,
                      const char* of) {
  std::vector<std::string> paths;
  for (const AdapterModule& module : modules) paths.push_back(module.path);
  return lora_error(fmt::format("{}: {} matches no {}{}", key, value_text(text), of, name_hint(text, paths)),
                    "give the end of a module's path, such as \"q_proj\" or \"layers.3.mlp.up_proj\", or "
                    "\"regex:...\"");
}

// Marks the modules that one of these names matches.
std::vector<bool> matched(const char* key, const std::vector<std::string>& names,
                          const std::vector<AdapterModule>& modules, const ModelSpec& model) {
  std::vector<bool> out(modules.size());
  for (const std::string& name : names) {
    const ModulePattern pattern(name);
    bool some = false;
    for (size_t m = 0; m < modules.size(); ++m) {
      // As with peft, targets are modules: experts' parameters are adapted where they are asked for.
      const bool meant = !modules[m].stacked || std::string_view(key) != "lora.targets" ||
                         (!pattern.is_regex() && names_module(modules[m].name, name));
      if (!meant || !pattern.matches(modules[m])) continue;
      if (pattern.is_all_linear() && peft_takes_for_experts(model, modules[m])) continue;
      out[m] = some = true;
    }
    if (some) continue;
    if (pattern.is_regex() || std::string_view(key) != "lora.targets")
      throw matches_nothing(key, name, modules, "linear layer of the model");
    resolve_targets(model.names, {name}, key);  // names the family's modules
    throw matches_nothing(key, name, modules, "linear layer of the model that adapters may be on");
  }
  return out;
}

// The modules that get an adapter, without ranks.
std::vector<AdapterSite> chosen_sites(const ModelSpec& model, const LoraConfig& lora,
                                      const std::vector<AdapterModule>& modules) {
  if (lora.experts) require_experts(model);
  if (lora.targets.empty()) resolve_targets(model.names, {}, "lora.targets");
  const std::vector<bool> targets = matched("lora.targets", lora.targets, modules, model);
  const std::vector<bool> excluded = matched("lora.exclude", lora.exclude, modules, model);
  for (const int64_t layer : lora.layers) {
    if (layer < model.layer_count()) continue;
    throw lora_error(fmt::format("lora.layers: the model has no layer {}", layer),
                     fmt::format("its layers are 0 to {}", model.layer_count() - 1));
  }
  const auto in_layers = [&](const AdapterModule& module) {
    const auto& layers = lora.layers;
    if (layers.empty() || std::find(layers.begin(), layers.end(), module.layer) != layers.end()) return true;
    // A module that is named by its whole path is meant, whatever its layer.
    return std::find(lora.targets.begin(), lora.targets.end(), module.path) != lora.targets.end();
  };
  std::vector<AdapterSite> out;
  for (size_t m = 0; m < modules.size(); ++m) {
    const bool wanted = targets[m] || (lora.experts && modules[m].stacked);
    if (wanted && !excluded[m] && in_layers(modules[m]))
      out.push_back({.module = m, .r = lora.r, .alpha = lora.alpha});
  }
  if (!out.empty()) return out;
  throw lora_error("lora.targets, lora.exclude and lora.layers together leave no module that gets an adapter",
                   "exclude less, or name other layers");
}

// The modules that lora.also names, as AdapterSpec::also has them.
std::vector<std::string> chosen_whole(const ModelSpec& model, const std::vector<std::string>& also) {
  const std::vector<WholeModule> modules = whole_modules(model);
  std::vector<bool> chosen(modules.size());
  for (const std::string& name : also) {
    // The two are one tensor, which users of other programs name by both.
    const bool tied = model.tied && (name == kAlsoHead || name == model.names.head);
    const std::string_view wanted = tied ? kAlsoEmbedding : std::string_view(name);
    bool some = false;
    for (size_t m = 0; m < modules.size(); ++m) {
      if (wanted != modules[m].word && !names_module(wanted, modules[m].path)) continue;
      chosen[m] = some = true;
    }
    if (some) continue;
    std::vector<std::string> paths;
    for (const WholeModule& module : modules) paths.push_back(module.path);
    if (model.scores() && name == kAlsoHead)
      throw lora_error("lora.also: the model has a head of scores in place of \"lm_head\"",
                       "leave it out: a head of scores is trained whole beside every adapter");
    throw lora_error(
        fmt::format("lora.also: {} is no embedding, head or norm of the model{}", value_text(name),
                    name_hint(name, paths)),
        "use \"embed_tokens\", \"lm_head\", \"norms\" or the end of such a module's path; linear "
        "layers of the blocks get adapters, by lora.targets");
  }
  std::vector<std::string> out;
  for (size_t m = 0; m < modules.size(); ++m)
    if (chosen[m]) out.push_back(modules[m].path);
  return out;
}

// Sets `field` of each site by the first of these patterns that matches.
template <class T>
void set_by_pattern(const char* key, const ModuleValues<T>& values, const std::vector<AdapterModule>& modules,
                    T AdapterSite::*field, std::vector<AdapterSite>& sites) {
  std::vector<bool> done(sites.size());
  for (const auto& [name, value] : values.all) {
    const ModulePattern pattern(name);
    bool some = false;
    for (size_t s = 0; s < sites.size(); ++s) {
      if (!pattern.matches(modules[sites[s].module])) continue;
      some = true;
      if (!done[s]) sites[s].*field = value;
      done[s] = true;
    }
    if (some) continue;
    std::vector<AdapterModule> adapted;
    for (const AdapterSite& site : sites) adapted.push_back(modules[site.module]);
    throw matches_nothing(key, name, adapted, "module that gets an adapter");
  }
}

template <class T>
ModuleValues<T> values_of(const std::vector<std::pair<std::string, T>>& values) {
  return {values};
}

bool alike(const std::vector<std::pair<std::string, double>>& a,
           const std::vector<std::pair<std::string, double>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && std::abs(x.second - y.second) <= 1e-6 * std::abs(y.second);
  });
}

// `lora` with `given`'s values of the keys of these modules that are not written.
LoraConfig asked_of(const ModelSpec& model, const LoraConfig& lora, const AdapterSpec& given) {
  LoraConfig out = resolved_lora(model, lora, given);
  if (written(lora, "targets")) out.targets = lora.targets;
  if (written(lora, "exclude")) out.exclude = lora.exclude;
  if (written(lora, "layers")) out.layers = lora.layers;
  if (written(lora, "experts") || written(lora, "targets")) out.experts = lora.experts;
  if (written(lora, "ranks")) out.ranks = lora.ranks;
  if (written(lora, "alphas")) out.alphas = lora.alphas;
  return out;
}

// `given` with rslora as it is written, and the alphas that scale alike.
AdapterSpec scaled_alike(const std::vector<AdapterModule>& modules, const LoraConfig& lora,
                         const AdapterSpec& given) {
  AdapterSpec out = given;
  if (written(lora, "rslora")) out.rslora = lora.rslora;
  const auto divisor = [&](int64_t r) {
    return out.rslora ? std::sqrt(static_cast<double>(r)) : static_cast<double>(r);
  };
  out.alpha = given.rslora == out.rslora ? given.alpha : given.scale() * divisor(given.r);
  if (given.rslora == out.rslora || (given.ranks.empty() && given.alphas.empty())) return out;
  std::vector<AdapterSite> sites = list_sites(modules, given);
  for (AdapterSite& site : sites) site.alpha = given.scale_of(modules[site.module].path) * divisor(site.r);
  set_sites(modules, sites, out);
  return out;
}

// Of the layers that the adapter is in.
bool adapts_all_experts(const ModelSpec& model, const AdapterSpec& adapter) {
  bool some = false, all = true;
  for (const AdapterModule& module : lora_modules(model)) {
    const std::vector<int64_t>& layers = adapter.layers;
    const bool here = layers.empty() || std::find(layers.begin(), layers.end(), module.layer) != layers.end();
    if (!module.stacked || !here) continue;
    some = true;
    all = all && adapter.adapts(module.layer, module.path);
  }
  return some && all;
}

AdapterKind kind_of(Method method) {
  switch (method) {
    case Method::kIa3:
      return AdapterKind::kIa3;
    case Method::kNorms:
      return AdapterKind::kNorms;
    case Method::kPrefix:
      return AdapterKind::kPrefix;
    case Method::kPrompt:
    case Method::kPtuning:
      return AdapterKind::kPrompt;
    case Method::kFull:
    case Method::kLora:
    case Method::kQlora:
      break;
  }
  return AdapterKind::kLora;
}

// A fresh adapter of IA3 or LN tuning.
AdapterSpec without_pairs(const ModelSpec& model, const Config& config) {
  const AdapterKind kind = kind_of(config.train.method);
  const bool norms = kind == AdapterKind::kNorms;
  const std::vector<std::string> targets =
      written(config.lora, "targets") ? config.lora.targets : default_targets(model, kind);
  if (targets.empty())
    throw lora_error(fmt::format("train.method = {} has no default modules for {}",
                                 value_text(config.train.method), model.model_type),
                     norms ? "set lora.targets to the ends of the norms' paths, such as \"input_layernorm\""
                           : "set lora.targets to the linear layers that are scaled");
  const std::vector<AdapterModule> modules = norms ? norm_modules(model) : adapter_modules(model);
  std::vector<bool> chosen(modules.size());
  for (const std::string& name : targets) {
    const ModulePattern pattern(name);
    bool some = false;
    for (size_t m = 0; m < modules.size(); ++m) {
      if (!pattern.matches(modules[m])) continue;
      chosen[m] = some = true;
    }
    if (!some || (norms && name == "all-linear"))
      throw matches_nothing("lora.targets", name, modules,
                            norms ? "norm of the model" : "linear layer of the model");
  }
  AdapterSpec out;
  out.kind = kind;
  out.targets = shortest_targets(modules, chosen);
  return out;
}

// A fresh prefix or prompt.
AdapterSpec with_virtual_tokens(const ModelSpec& model, const Config& config) {
  AdapterSpec out;
  out.kind = kind_of(config.train.method);
  out.virtual_tokens = config.prompt.length;
  if (config.train.method == Method::kPtuning) out.encoder = config.prompt.hidden.value_or(model.hidden);
  const std::string mistake = virtual_token_mistake(model, out.kind);
  if (!mistake.empty())
    throw lora_error(fmt::format("train.method = {} and model_type = {}: {}", value_text(config.train.method),
                                 model.model_type, mistake),
                     "set train.method = \"lora\"");
  return out;
}

// A continued adapter brings its own number.
void require_room(int64_t tokens, int64_t max_length) {
  if (tokens + 2 <= max_length) return;
  throw lora_error(
      fmt::format("the adapter's {} virtual tokens leave {} of data.max_length = {} to a document", tokens,
                  max_length - tokens, max_length),
      "raise data.max_length");
}

Error continued_otherwise(std::string what, const std::string& directory, std::string next) {
  return setting_error("the adapter of lora.init is continued as it is: " + std::move(what), directory,
                       std::move(next));
}

}  // namespace

Method method_of(AdapterKind kind) {
  switch (kind) {
    case AdapterKind::kLora:
      return Method::kLora;
    case AdapterKind::kIa3:
      return Method::kIa3;
    case AdapterKind::kNorms:
      return Method::kNorms;
    case AdapterKind::kPrefix:
      return Method::kPrefix;
    case AdapterKind::kPrompt:
      return Method::kPrompt;
  }
  return Method::kLora;
}

AdapterSpec configured_adapter(const ModelSpec& model, const Config& config) {
  if (has_virtual_tokens(config.train.method)) return with_virtual_tokens(model, config);
  if (kind_of(config.train.method) != AdapterKind::kLora) return without_pairs(model, config);
  AdapterSpec out = configured_adapter(model, config.lora);
  require_type_of_model(model, config, out);
  require_plain_vocabulary(model, out);
  require_plain_experts(model, out, config.lora.start);
  require_biases(model, out);
  return out;
}

AdapterSpec continued_adapter(const ModelSpec& model, const Config& config, const AdapterSpec& given,
                              const std::string& directory) {
  const std::string there = value_text(method_of(given.kind));
  if (given.kind != kind_of(config.train.method))
    throw continued_otherwise("train.method = " + value_text(config.train.method) +
                                  " is written, and the adapter is one of train.method = " + there,
                              directory, "set train.method = " + there);
  if (given.kind == AdapterKind::kLora) {
    require_type_of_model(model, config, given);
    AdapterSpec out = continued_adapter(model, config.lora, given, directory);
    require_plain_vocabulary(model, out);
    require_plain_experts(model, out, config.lora.start);
    return out;
  }
  // One that an encoder has computed is refused as it is trained (launcher/planned_model.h).
  if (config.train.method == Method::kPtuning && !given.encoded)
    throw continued_otherwise("train.method = \"ptuning\" trains an encoder, and the adapter has none",
                              directory, "set train.method = \"prompt\"");
  if (has_virtual_tokens(config.train.method)) {
    if (config.prompt.length_written && config.prompt.length != given.virtual_tokens)
      throw continued_otherwise(fmt::format("prompt.length = {} is written, and the adapter has {}",
                                            config.prompt.length, given.virtual_tokens),
                                directory, "leave prompt.length out");
    require_room(given.virtual_tokens, config.data.max_length);
    return given;
  }
  if (!written(config.lora, "targets")) return given;
  if (const AdapterSpec asked = without_pairs(model, config); asked.targets != given.targets)
    throw continued_otherwise("lora.targets = " + value_text(asked.targets) +
                                  " is written, and the adapter has targets " + value_text(given.targets),
                              directory, "leave lora.targets out");
  return given;
}

AdapterSpec configured_adapter(const ModelSpec& model, const LoraConfig& lora) {
  AdapterSpec out{.r = lora.r,
                  .alpha = lora.alpha,
                  .rslora = lora.rslora,
                  .dora = lora.dora,
                  .pissa = lora.start == LoraStart::kPissa,
                  .dropout = lora.dropout,
                  .targets = {},
                  .bias = lora.bias};
  const std::vector<AdapterModule> modules = lora_modules(model);
  std::vector<AdapterSite> sites = chosen_sites(model, lora, modules);
  set_by_pattern("lora.ranks", lora.ranks, modules, &AdapterSite::r, sites);
  set_by_pattern("lora.alphas", lora.alphas, modules, &AdapterSite::alpha, sites);
  set_sites(modules, sites, out);
  out.also = chosen_whole(model, lora.also);
  return out;
}

AdapterSpec continued_adapter(const ModelSpec& model, const LoraConfig& lora, const AdapterSpec& given,
                              const std::string& directory) {
  std::string what;
  const auto differs = [&](const std::string& asked, const std::string& there) {
    what += (what.empty() ? "" : "; ") + asked + " is written, and the adapter has " + there;
  };
  const std::vector<AdapterModule> modules = lora_modules(model);
  if (written(lora, "r") && lora.r != given.r)
    differs("lora.r = " + value_text(lora.r), "r = " + value_text(given.r));
  // An adapter may be stored with another alpha and without rslora, as its equal.
  AdapterSpec out = scaled_alike(modules, lora, given);
  out.dropout = lora.dropout;
  if (written(lora, "alpha")) {
    const double there = std::abs(out.alpha);
    if (std::abs(lora.alpha - out.alpha) > 1e-6 * there)
      differs("lora.alpha = " + value_text(lora.alpha),
              "alpha = " + value_text(out.alpha) + (out.rslora ? " with rslora" : ""));
    else
      out.alpha = lora.alpha;
  }
  const LoraConfig keys = asked_of(model, lora, out);
  LoraConfig modules_alone = keys;
  modules_alone.ranks = {};
  modules_alone.alphas = {};
  AdapterSpec asked = configured_adapter(model, modules_alone);
  if (asked.targets != out.targets || asked.layers != out.layers) {
    const auto chosen = [](const AdapterSpec& one) {
      return value_text(one.targets) + (one.layers.empty() ? "" : " in layers " + value_text(one.layers));
    };
    differs("lora.targets = " + chosen(asked), "targets " + chosen(out));
  } else if (asked = configured_adapter(model, keys); asked.r != out.r || asked.ranks != out.ranks) {
    differs("lora.ranks = " + value_text(lora.ranks),
            "r = " + value_text(out.r) + " and ranks " + value_text(values_of(out.ranks)));
  } else if (alike(asked.alphas, out.alphas)) {
    out.alphas = asked.alphas;
  } else {
    differs("lora.alphas = " + value_text(lora.alphas),
            "alpha = " + value_text(out.alpha) + " and alphas " + value_text(values_of(out.alphas)));
  }
  if (written(lora, "experts") && !lora.experts && adapts_experts(model, given) && !written(lora, "targets"))
    differs("lora.experts = false", "pairs of experts");
  if (written(lora, "also") && chosen_whole(model, lora.also) != given.also)
    differs("lora.also = " + value_text(lora.also),
            given.also.empty() ? "no modules that are trained whole"
                               : "also " + value_text(shortest_also(model, given.also)));
  if (written(lora, "dora") && lora.dora != given.dora)
    differs("lora.dora = " + value_text(lora.dora), given.dora ? "magnitudes" : "no magnitudes");
  if (written(lora, "bias") && lora.bias != given.bias)
    differs("lora.bias = " + value_text(lora.bias), "bias = " + value_text(given.bias));
  if (lora.start != LoraStart::kZero) differs("lora.start = " + value_text(lora.start), "weights of its own");
  if (what.empty()) return out;
  throw continued_otherwise(what, directory,
                            "leave these keys out, or leave out lora.init to train a fresh adapter");
}

void require_trainable(const ModelSpec& model, const AdapterSpec& given, const std::string& directory) {
  if (given.kind != AdapterKind::kLora) return;
  for (const AdapterSite& site : list_sites(lora_modules(model), given)) {
    if (site.alpha > 0) continue;
    throw continued_otherwise(
        fmt::format("its lora_alpha is {:g}, and a run's lora.alpha must be greater than 0", site.alpha),
        directory,
        "merge it into its base model, and train that: lmlaunch export " + directory + " --merge -o DIR");
  }
}

LoraConfig resolved_lora(const ModelSpec& model, const LoraConfig& lora, const AdapterSpec& adapter) {
  LoraConfig out = lora;
  if (adapter.virtual_tokens > 0) return out;
  out.targets = adapter.targets;
  out.also = shortest_also(model, adapter.also);
  // By number where another adapter names them; what is written stays.
  if (lora.tokens.empty())
    for (const int64_t token : adapter.tokens) out.tokens.push_back({.text = "", .id = token});
  if (adapter.kind != AdapterKind::kLora) return out;
  out.r = adapter.r;
  out.alpha = adapter.alpha;
  out.rslora = adapter.rslora;
  out.dora = adapter.dora;
  out.bias = adapter.bias;
  out.exclude.clear();
  out.layers = adapter.layers;
  out.experts = adapts_all_experts(model, adapter);
  out.ranks = values_of(adapter.ranks);
  out.alphas = values_of(adapter.alphas);
  return out;
}

}  // namespace lm
