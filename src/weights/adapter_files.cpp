#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "base/json.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

constexpr int64_t kMostRank = 1 << 16, kMostLabels = 1 << 16;

[[noreturn]] void fail(const std::string& key, const std::string& what, const std::string& place) {
  throw Error(Exit::kInput, {.area = "FILE-23",
                             .what = key + " " + what,
                             .place = place,
                             .next = "use a plain LoRA adapter of linear layers"});
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
      "revision",       "runtime_config",      "target_modules",
      "task_type",      "use_rslora"};
  return kHarmless.contains(key);
}

// fan_in_fan_out: the base stores W as [in, out], as GPT-2 does, or is unknown.
bool stored_transposed(const NameMap* base) {
  return base == nullptr || std::ranges::any_of(base->modules, &ModuleName::transposed);
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

// "model.layers.3.self_attn.q_proj" -> "self_attn.q_proj": PEFT writes whole paths for small models. Loading
// checks that every layer has its tensors.
std::string without_layer(const std::string& module) {
  std::string path = canonical_name(module + ".").text;  // a wrapper's names, and GPT-2's
  path.pop_back();
  for (const std::string prefix : {"base_model.model.", "model.", "transformer.", "layers.", "h."}) {
    if (path.starts_with(prefix)) path.erase(0, prefix.size());
  }
  const size_t digits = path.find_first_not_of("0123456789");
  if (digits > 0 && digits != std::string::npos && path[digits] == '.') path.erase(0, digits + 1);
  return path;
}

std::vector<std::string> read_targets(const Json& config, const NameMap* model, const std::string& directory,
                                      const std::string& place) {
  const auto it = config.find("target_modules");
  std::vector<std::string> names;
  if (it != config.end() && it->is_array()) {
    for (const Json& name : *it) {
      if (!name.is_string()) fail("target_modules", "must be a list of strings", place);
      names.push_back(without_layer(name.get<std::string>()));
    }
  } else if (it != config.end() && it->is_string()) {
    // A pattern: the modules that it matched are those in the file.
    constexpr std::string_view kEnd = ".lora_A.weight";
    const ModelFiles files(directory, kAdapterWeights);
    for (const ModelFiles::Tensor& tensor : files.tensors()) {
      const std::string& name = tensor.name;
      if (name.ends_with(kEnd)) names.push_back(without_layer(name.substr(0, name.size() - kEnd.size())));
    }
  } else {
    fail("target_modules", "must be a list of module names or a pattern", place);
  }
  if (model == nullptr) return names;
  try {
    return resolve_targets(*model, names, place);
  } catch (const Error& error) {
    ErrorText text = error.text();  // the file's fault, not the configuration's
    text.area = "FILE-23";
    text.next = "use the base model that the adapter was trained on";
    throw Error(Exit::kInput, text);
  }
}

void refuse_what_is_set(const Json& config, const NameMap* base, const std::string& place) {
  for (const auto& [key, value] : config.items()) {
    if (is_neutral(value) || is_harmless(key)) continue;
    if (key == "modules_to_save" && is_score_head(config, value)) continue;
    if (key == "fan_in_fan_out" && value == true && stored_transposed(base)) continue;
    // The default pattern of layers only matters together with layers_to_transform.
    fail(key.substr(0, 100), "= " + value.dump(-1, ' ', true).substr(0, 100) + " is not supported", place);
  }
  const std::string type = text(config, "peft_type", "", place);
  if (type != "LORA")
    fail("peft_type", "= \"" + type.substr(0, 100) + "\" is not supported, only LORA", place);
  const std::string task = text(config, "task_type", "CAUSAL_LM", place);
  if (task != "CAUSAL_LM" && task != "SEQ_CLS")
    fail("task_type", "= \"" + task.substr(0, 100) + "\" is not supported, only CAUSAL_LM and SEQ_CLS",
         place);
  const std::string bias = text(config, "bias", "none", place);
  if (bias != "none") fail("bias", "= \"" + bias.substr(0, 100) + "\" is not supported, only none", place);
  // These initialisations also changed the base weights, so the stored A and B do not fit the published base.
  const auto init = config.find("init_lora_weights");
  if (init != config.end() && init->is_string() && *init != "gaussian" && *init != "orthogonal" &&
      *init != "eva") {
    fail("init_lora_weights", "= " + init->dump(-1, ' ', true).substr(0, 100) + " is not supported", place);
  }
}

}  // namespace

AdapterConfig read_adapter_config(const std::string& directory, const NameMap* names) {
  const std::string place = directory + "/" + kAdapterConfig;
  const Json config = read_json_file(place, {.bytes = int64_t{4} << 20, .depth = 32});
  if (!config.is_object()) fail_json("adapter_config.json must hold one object", place, 0);
  refuse_what_is_set(config, names, place);
  AdapterConfig out;
  out.base_model = text(config, "base_model_name_or_path", "", place);
  if (const auto mapping = config.find("auto_mapping"); mapping != config.end() && mapping->is_object())
    out.base_class = text(*mapping, "base_model_class", "", place);
  out.base_revision = text(config, "revision", "", place);
  const auto r = config.find("r");
  const bool has_rank = r != config.end() && r->is_number_integer();
  if (!has_rank || number(config, "r", 0, place) < 1 || number(config, "r", 0, place) > double{kMostRank}) {
    fail("r", fmt::format("must be an integer in 1 .. {}", kMostRank), place);
  }
  out.spec.r = r->get<int64_t>();
  out.spec.alpha = number(config, "lora_alpha", 8, place);
  out.spec.dropout = number(config, "lora_dropout", 0, place);
  if (!(out.spec.dropout >= 0 && out.spec.dropout < 1)) fail("lora_dropout", "must be in [0, 1)", place);
  const auto rslora = config.find("use_rslora");
  if (rslora != config.end() && !rslora->is_null() && !rslora->is_boolean()) {
    fail("use_rslora", "must be true or false", place);
  }
  out.spec.rslora = rslora != config.end() && *rslora == true;
  out.spec.targets = read_targets(config, names, directory, place);
  return out;
}

int64_t load_adapter(const std::string& directory, const ModelLayout& layout, const FindTarget& target,
                     const LoadOptions& options) {
  return load_adapter_tensors(ModelFiles(directory, kAdapterWeights), layout, target, options);
}

void check_adapter(const std::string& directory, const ModelSpec& base) {
  const AdapterSpec spec = read_adapter_config(directory, &base.names).spec;
  // A head of scores that the base does not have has as many rows as the adapter's file says.
  ModelSpec with_head = base;
  const ModelFiles files(directory, kAdapterWeights);
  const auto head = files.find(std::string(kAdapterPrefix) + "score.weight");
  if (head && !base.scores() && head->entry->shape.size() == 2 && head->entry->shape[0] >= 1 &&
      head->entry->shape[0] <= kMostLabels)
    set_score_head(with_head,
                   {.labels = std::vector<std::string>(static_cast<size_t>(head->entry->shape[0]))},
                   directory);
  const auto unread = [](size_t, const TensorPlace&) { return LoadTarget{}; };
  load_adapter(directory, make_layout(with_head, &spec, DType::kF32), unread, {});
}

}  // namespace lm
