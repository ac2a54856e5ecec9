#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "weights/adapter_files.h"
#include "weights/other_adapters.h"
#include "weights/peft_modules.h"
#include "weights/saved_modules.h"
#include "weights/tensor_names.h"

namespace lm {
namespace {

constexpr int64_t kMostLabels = 1 << 16;
// P-tuning: its file has the prompt, and not the encoder that has made it.
constexpr const char* kEncodedPrompt = "P_TUNING";
const std::string kPrefix(kAdapterPrefix), kEnd = ".lora_A.weight", kEmbeddingEnd = ".lora_embedding_A";

[[noreturn]] void fail(const std::string& key, const std::string& what, const std::string& place) {
  refuse_adapter(key, what, place);
}

bool is_neutral(const Json& value) {
  return value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty()) ||
         value == "";
}

// Settings that do not change y = Wx + s·B(A x) once the weights are stored; everything else must be off.
bool is_harmless(const std::string& key) {
  static const std::set<std::string> kHarmless = {
      "alpha",          "auto_mapping",        "base_model_name_or_path",
      "bias",           "ensure_weight_tying", "eva_config",
      "inference_mode", "init_lora_weights",   "lora_alpha",
      "lora_dropout",   "megatron_core",       "peft_type",
      "peft_version",   "qalora_group_size",   "r",
      "revision",       "runtime_config",      "task_type",
      "use_dora",       "use_rslora"};
  // Read by PeftChoice.
  static const std::set<std::string> kModules = {"alpha_pattern",       "exclude_modules", "layers_pattern",
                                                 "layers_to_transform", "rank_pattern",    "target_modules",
                                                 "target_parameters"};
  if (kModules.contains(key)) return true;
  return kHarmless.contains(key);
}

// fan_in_fan_out: the base stores W as [in, out], as GPT-2 does, or is unknown.
bool stored_transposed(const ModelSpec* base) {
  return base == nullptr || std::ranges::any_of(base->names.modules, &ModuleName::transposed);
}

// PEFT's names of the head of a model for sequence classification, which it saves beside the adapter.
bool is_score_head(const Json& config, const Json& modules) {
  const auto task = config.find("task_type");
  if (task == config.end() || *task != "SEQ_CLS" || !modules.is_array()) return false;
  const auto names = [](const Json& name) { return name == "score" || name == "classifier"; };
  return std::ranges::all_of(modules, names) && std::ranges::find(modules, Json("score")) != modules.end();
}

double number(const Json& config, const char* key, double missing, const std::string& place) {
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return missing;
  if (!it->is_number() || !std::isfinite(it->get<double>())) fail(key, "must be a number", place);
  return it->get<double>();
}

std::string text(const Json& config, const char* key, const std::string& missing, const std::string& place) {
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return missing;
  if (!it->is_string()) fail(key, "must be a string", place);
  return it->get<std::string>();
}

// False where it is missing.
bool flag(const Json& config, const char* key, const std::string& place) {
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return false;
  if (!it->is_boolean()) fail(key, "must be true or false", place);
  return it->get<bool>();
}

// What the file calls A of a module.
std::string name_in_file(const AdapterModule& module, const ModelSpec& base) {
  return kPrefix + module.path + (module.path == base.names.embedding ? kEmbeddingEnd : kEnd);
}

// The paths of the base's modules in the class that the adapter was trained in, by its tensors: a text model
// or its wrapper. `files` null: they do not matter.
std::vector<std::string> paths_in_file(const std::vector<AdapterModule>& modules, const ModelFiles* files,
                                       const ModelSpec& base) {
  std::vector<std::string> out;
  for (const AdapterModule& module : modules) {
    std::string name = name_in_file(module, base);
    const size_t end = name.size() - kPrefix.size() - module.path.size();
    const auto tensor = files == nullptr ? std::nullopt : files->find(name);
    name = tensor ? tensor->entry->name : base.wrapper.empty() ? name : wrapped_name(name);
    out.push_back(name.substr(kPrefix.size(), name.size() - kPrefix.size() - end));
  }
  return out;
}

// The modules that PEFT would adapt. Where target_modules is one expression they are those of the file, and
// the expression, if it can be read here, must choose the same.
std::vector<AdapterSite> find_sites(const PeftChoice& choice, const PeftModules& of, const ModelFiles* files,
                                    const ModelSpec& base, const AdapterSpec& other) {
  std::vector<AdapterSite> out;
  for (size_t m = 0; m < of.modules.size(); ++m) {
    const std::string& path = of.modules[m].path;
    const std::optional<bool> chosen = choice.chooses(of, m);
    if (of.modules[m].stacked) {
      if (*chosen) out.push_back(choice.site(of, m, other));
      continue;
    }
    const bool there = choice.by_pattern() && files->find(name_in_file(of.modules[m], base)).has_value();
    if (choice.by_pattern() && chosen && *chosen != there)
      fail("target_modules",
           "and the adapter's tensors disagree about " + path + (there ? ", which has" : ", which has no") +
               " adapter there",
           files->directory());
    if (choice.by_pattern() ? there : *chosen) out.push_back(choice.site(of, m, other));
  }
  return out;
}

// Before peft 0.19.1 A and B of a parameter of experts were on the other one's dimension, and where the two
// are equal nothing in the file tells.
void require_layout_of_stacks(const Json& config, const std::string& place) {
  const std::string version = text(config, "peft_version", "", place);
  std::array<int, 3> parts = {};
  std::istringstream in(version);
  for (int& part : parts) {
    in >> part;
    in.ignore();
  }
  if (parts >= std::array{0, 19, 1}) return;
  fail("target_parameters",
       version.empty()
           ? "needs peft_version, which tells how the tensors lie"
           : "of peft " + version.substr(0, 20) + " has other tensors than those of 0.19.1 and later",
       place);
}

void read_modules(const Json& config, const std::string& directory, const std::string& text,
                  const ModelSpec& base, AdapterSpec& out) {
  const std::string place = directory + "/" + kAdapterConfig;
  const PeftChoice choice(config, text, place);
  std::optional<ModelFiles> files;
  if (choice.needs_paths()) files.emplace(directory, kAdapterWeights);
  const ModelFiles* const from = files ? &*files : nullptr;
  PeftModules of{.modules = lora_modules(base), .paths = {}};
  of.paths = paths_in_file(of.modules, from, base);
  try {
    choice.require_known(of, base.names);
  } catch (const Error& error) {
    ErrorText message = error.text();  // the file's fault, not the configuration's
    message.area = "FILE-23";
    message.next = "use the base model that the adapter was trained on";
    throw Error(Exit::kInput, message);
  }
  choice.require_known_parameters(of);
  const std::vector<AdapterSite> sites = find_sites(choice, of, from, base, out);
  if (sites.empty()) fail("target_modules", "and the keys beside it choose no module of the model", place);
  if (std::ranges::any_of(sites, [&](const AdapterSite& site) { return of.modules[site.module].stacked; }))
    require_layout_of_stacks(config, place);
  set_sites(of.modules, sites, out);
}

AdapterKind kind_of(const Json& config, const std::string& place) {
  const std::string type = text(config, "peft_type", "", place);
  if (type == "LORA") return AdapterKind::kLora;
  if (type == "IA3") return AdapterKind::kIa3;
  if (type == "LN_TUNING") return AdapterKind::kNorms;
  if (type == "PREFIX_TUNING") return AdapterKind::kPrefix;
  if (type == "PROMPT_TUNING" || type == kEncodedPrompt) return AdapterKind::kPrompt;
  fail("peft_type",
       "= \"" + type.substr(0, 100) +
           "\" is not supported, only LORA, IA3, LN_TUNING, PREFIX_TUNING, PROMPT_TUNING "
           "and P_TUNING",
       place);
}

AdapterBias bias_of(const Json& config, const std::string& place) {
  const std::string name = text(config, "bias", "none", place);
  const auto found = std::ranges::find(kAdapterBiasNames, name);
  if (found != std::end(kAdapterBiasNames))
    return static_cast<AdapterBias>(found - std::begin(kAdapterBiasNames));
  fail("bias", "= \"" + name.substr(0, 100) + "\" is not supported, only none, all and lora_only", place);
}

void refuse_what_is_set(const Json& config, AdapterKind kind, const ModelSpec* base,
                        const std::string& place) {
  for (const auto& [key, value] : config.items()) {
    const bool lora = kind == AdapterKind::kLora;
    if (is_neutral(value) || (lora ? is_harmless(key) : is_known_without_pairs(kind, key))) continue;
    // Read with the base (saved_modules.h); without pairs only a head of scores is saved.
    if (key == "modules_to_save" && (lora || is_score_head(config, value))) continue;
    if (key == "trainable_token_indices" && lora) continue;
    if (key == "fan_in_fan_out" && value == true && stored_transposed(base)) continue;
    fail(key.substr(0, 100), "= " + value.dump(-1, ' ', true).substr(0, 100) + " is not supported", place);
  }
  const std::string task = text(config, "task_type", "CAUSAL_LM", place);
  if (task != "CAUSAL_LM" && task != "SEQ_CLS")
    fail("task_type", "= \"" + task.substr(0, 100) + "\" is not supported, only CAUSAL_LM and SEQ_CLS",
         place);
  if (task == "SEQ_CLS" && !is_score_head(config, config.value("modules_to_save", Json())))
    fail("task_type", "= \"SEQ_CLS\" has a head of scores, and modules_to_save does not name \"score\"",
         place);
  // These initialisations also changed the base weights, so the stored A and B do not fit the published base.
  const auto init = config.find("init_lora_weights");
  if (init != config.end() && init->is_string() && *init != "gaussian" && *init != "orthogonal" &&
      *init != "eva") {
    fail("init_lora_weights", "= " + init->dump(-1, ' ', true).substr(0, 100) + " is not supported", place);
  }
}

}  // namespace

AdapterConfig read_adapter_config(const std::string& directory, const ModelSpec* base) {
  constexpr JsonLimits kLimits = {.bytes = int64_t{4} << 20, .depth = 32};
  const std::string place = directory + "/" + kAdapterConfig;
  const std::string contents = read_small_file(place, kLimits.bytes);
  const Json config = parse_json(contents, place, kLimits);
  if (!config.is_object()) fail_json("adapter_config.json must hold one object", place, 0);
  AdapterConfig out;
  out.spec.kind = kind_of(config, place);
  refuse_what_is_set(config, out.spec.kind, base, place);
  out.base_model = text(config, "base_model_name_or_path", "", place);
  if (const auto mapping = config.find("auto_mapping"); mapping != config.end() && mapping->is_object())
    out.base_class = text(*mapping, "base_model_class", "", place);
  out.base_revision = text(config, "revision", "", place);
  out.scores = text(config, "task_type", "CAUSAL_LM", place) == "SEQ_CLS";
  if (out.spec.kind == AdapterKind::kPrefix || out.spec.kind == AdapterKind::kPrompt) {
    read_virtual_tokens(config, directory, base, out.spec);
    out.spec.encoded = text(config, "peft_type", "", place) == kEncodedPrompt;
    if (out.scores) fail("task_type", "= \"SEQ_CLS\" is not supported beside virtual tokens", place);
    return out;
  }
  if (out.spec.kind != AdapterKind::kLora) {
    if (base != nullptr) read_without_pairs(config, directory, *base, out.spec);
    return out;
  }
  const auto r = config.find("r");
  const bool has_rank = r != config.end() && r->is_number_integer();
  if (!has_rank || number(config, "r", 0, place) < 1 || number(config, "r", 0, place) > double{kMostRank}) {
    fail("r", fmt::format("must be an integer in 1 .. {}", kMostRank), place);
  }
  out.spec.r = r->get<int64_t>();
  out.spec.alpha = number(config, "lora_alpha", 8, place);
  out.spec.dropout = number(config, "lora_dropout", 0, place);
  if (!(out.spec.dropout >= 0 && out.spec.dropout < 1)) fail("lora_dropout", "must be in [0, 1)", place);
  out.spec.rslora = flag(config, "use_rslora", place);
  out.spec.dora = flag(config, "use_dora", place);
  out.spec.bias = bias_of(config, place);
  if (base == nullptr) return out;
  read_modules(config, directory, contents, *base, out.spec);
  out.spec.also = read_saved_modules(config, *base, place);
  out.spec.tokens = read_token_indices(config, *base, place);
  const bool whole = std::ranges::find(out.spec.also, base->names.embedding) != out.spec.also.end();
  if (whole && !out.spec.tokens.empty())
    fail("trainable_token_indices", "are rows of the embedding that modules_to_save has as a whole", place);
  return out;
}

int64_t load_adapter(const std::string& directory, const ModelLayout& layout, const FindTarget& target,
                     const LoadOptions& options) {
  return load_adapter_tensors(ModelFiles(directory, kAdapterWeights), layout, target, options);
}

void check_adapter(const std::string& directory, const ModelSpec& base) {
  const AdapterSpec spec = read_adapter_config(directory, &base).spec;
  // A head of scores that the base does not have has as many rows as the adapter's file says.
  ModelSpec with_head = base;
  const ModelFiles files(directory, kAdapterWeights);
  const auto head = files.find(kPrefix + "score.weight");
  if (head && !base.scores() && head->entry->shape.size() == 2 && head->entry->shape[0] >= 1 &&
      head->entry->shape[0] <= kMostLabels)
    set_score_head(with_head,
                   {.labels = std::vector<std::string>(static_cast<size_t>(head->entry->shape[0]))},
                   directory);
  const auto unread = [](size_t, const TensorPlace&) { return LoadTarget{}; };
  load_adapter(directory, make_layout(with_head, &spec, DType::kF32), unread, {.base = &with_head});
}

}  // namespace lm
