#include "weights/other_adapters.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <set>
#include <vector>

#include "weights/adapter_files.h"
#include "weights/model_files.h"
#include "weights/peft_modules.h"
#include "weights/tensor_names.h"

namespace lm {
namespace {

const std::string kPrefix(kAdapterPrefix);

// A list of names, or an expression that the whole path matches.
class Names {
 public:
  Names(const Json& config, const char* key, const std::string& place) {
    const auto it = config.find(key);
    if (it == config.end() || it->is_null()) return;
    if (it->is_string()) {
      pattern_ = PeftPattern::parse(it->get<std::string>());
      if (!pattern_) refuse_adapter(key, "is an expression that is not supported", place);
      return;
    }
    if (!it->is_array()) refuse_adapter(key, "must be a list of names or an expression", place);
    for (const Json& name : *it) {
      if (!name.is_string()) refuse_adapter(key, "must be a list of names or an expression", place);
      names_.push_back(name.get<std::string>());
    }
  }
  bool match(const std::string& path) const {
    if (pattern_) return pattern_->matches(path);
    return std::any_of(names_.begin(), names_.end(),
                       [&](const std::string& name) { return names_module(name, path); });
  }

 private:
  std::vector<std::string> names_;
  std::optional<PeftPattern> pattern_;
};

}  // namespace

bool is_known_without_pairs(AdapterKind kind, const std::string& key) {
  static const std::set<std::string> kBoth = {
      "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision",
      "task_type",    "target_modules"};
  static const std::set<std::string> kVirtual = {"num_virtual_tokens", "num_transformer_submodules",
                                                 "num_attention_heads", "num_layers", "token_dim"};
  // How new values begin, and the size of a projection, which prefix_projection = false leaves out.
  static const std::set<std::string> kPrefix = {"encoder_hidden_size", "init_weights"};
  static const std::set<std::string> kPrompt = {"encoder_dropout",    "encoder_hidden_size",
                                                "encoder_num_layers", "encoder_reparameterization_type",
                                                "prompt_tuning_init", "prompt_tuning_init_text",
                                                "tokenizer_kwargs",   "tokenizer_name_or_path"};
  const bool prefix = kind == AdapterKind::kPrefix, prompt = kind == AdapterKind::kPrompt;
  if (prefix || prompt)
    return key != "target_modules" &&
           (kBoth.contains(key) || kVirtual.contains(key) || (prefix ? kPrefix : kPrompt).contains(key));
  const bool ia3 = kind == AdapterKind::kIa3;
  return kBoth.contains(key) || (ia3 && (key == "feedforward_modules" || key == "init_ia3_weights"));
}

void read_without_pairs(const Json& config, const std::string& directory, const ModelSpec& base,
                        AdapterSpec& out) {
  const std::string place = directory + "/" + kAdapterConfig;
  const bool ia3 = out.kind == AdapterKind::kIa3;
  const Names targets(config, "target_modules", place), inputs(config, "feedforward_modules", place);
  const std::vector<AdapterModule> modules = ia3 ? adapter_modules(base) : norm_modules(base);
  const ModelFiles files(directory, kAdapterWeights);
  const std::string end = ia3 ? ".ia3_l" : ".ln_tuning_layers.weight";
  std::vector<bool> chosen(modules.size());
  for (size_t m = 0; m < modules.size(); ++m) {
    const std::string &path = modules[m].path, name = kPrefix + path + end;
    const auto tensor = files.find(name);
    chosen[m] = tensor.has_value();
    std::string theirs = base.wrapper.empty() ? path : wrapped_name(path);
    if (tensor)
      theirs = tensor->entry->name.substr(kPrefix.size(),
                                          tensor->entry->name.size() - kPrefix.size() - end.size());
    if (targets.match(theirs) != chosen[m])
      refuse_adapter("target_modules",
                     "and the adapter's tensors disagree about " + path +
                         (chosen[m] ? ", which has a tensor there" : ", which has no tensor there"),
                     place);
    if (ia3 && chosen[m] && inputs.match(theirs) != modules[m].feedforward)
      refuse_adapter("feedforward_modules",
                     "is not supported: an MLP's last layer has its input scaled here, and every other one "
                     "its output, unlike " +
                         path,
                     place);
  }
  if (std::find(chosen.begin(), chosen.end(), true) == chosen.end())
    refuse_adapter("target_modules", "chooses no module of the model", place);
  out.targets = shortest_targets(modules, chosen);
}

void read_virtual_tokens(const Json& config, const std::string& directory, const ModelSpec* base,
                         AdapterSpec& out) {
  const std::string place = directory + "/" + kAdapterConfig;
  const auto count = [&](const char* key) -> std::optional<int64_t> {
    const auto it = config.find(key);
    if (it == config.end() || it->is_null()) return std::nullopt;
    if (!it->is_number_integer() || *it < 1 || *it > kMostRank)
      refuse_adapter(key, fmt::format("must be an integer in 1 .. {}", kMostRank), place);
    return it->get<int64_t>();
  };
  const std::optional<int64_t> tokens = count("num_virtual_tokens");
  if (!tokens) refuse_adapter("num_virtual_tokens", "is missing", place);
  if (count("num_transformer_submodules").value_or(1) != 1)
    refuse_adapter("num_transformer_submodules", "other than 1 is not supported: it is of encoder-decoders",
                   place);
  out.virtual_tokens = *tokens;
  if (base == nullptr) return;
  const std::string mistake = virtual_token_mistake(*base, out.kind);
  if (!mistake.empty()) refuse_adapter("peft_type", "is not supported for this model: " + mistake, place);
  const PromptShape shape = prompt_shape(*base, out.kind);
  const auto require = [&](const char* key, int64_t expected) {
    const std::optional<int64_t> value = count(key);
    if (value && *value != expected)
      refuse_adapter(key, fmt::format("= {} does not fit the base model, which has {}", *value, expected),
                     place);
  };
  require("token_dim", shape.token_dim);
  require("num_layers", shape.layers);
  // Of a prompt it has no effect.
  if (out.kind == AdapterKind::kPrefix) require("num_attention_heads", shape.heads);
}

}  // namespace lm
