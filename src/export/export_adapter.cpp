#include "export/export_adapter.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "export/export_model.h"
#include "spec/adapter_sites.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

const char* name_of(const AdapterSpec& spec) {
  switch (spec.kind) {
    case AdapterKind::kLora:
      return spec.dora ? "DoRA" : "LoRA";
    case AdapterKind::kIa3:
      return "IA3";
    case AdapterKind::kNorms:
      return "LN tuning";
    case AdapterKind::kPrefix:
      return "Prefix tuning";
    case AdapterKind::kPrompt:
      return spec.encoded ? "P-tuning" : "Prompt tuning";
  }
  return "";
}

std::string card(const AdapterSpec& spec, const BaseModel& base) {
  const bool pairs = spec.kind == AdapterKind::kLora;
  std::string out =
      "---\nbase_model: " + Json(base.name).dump(-1, ' ', true) +
      "\nlibrary_name: peft\npipeline_tag: " + (base.scores ? "text-classification\n" : "text-generation\n") +
      (pairs ? "tags:\n- lora\n" : "") + "---\n\n";
  if (spec.virtual_tokens > 0)
    return out + fmt::format("{} adapter, {} virtual tokens.\n", name_of(spec), spec.virtual_tokens);
  out += std::string(name_of(spec)) + " adapter, " + (pairs ? fmt::format("r = {}, ", spec.r) : "") +
         "target modules:";
  for (const std::string& target : spec.targets) out += " " + target;
  return out + ".\n";
}

std::string escaped(const std::string& name) {
  std::string out;
  for (const char c : name) out += c == '.' ? "\\." : std::string(1, c);
  return out;
}

// A whole path as the base's class has it; a name stays.
std::string peft_name(const std::string& name, bool wrapped) {
  return wrapped ? wrapped_name(name) : name;
}

// "(a|b)", with a function for each.
template <class Values, class Text>
std::string one_of(const Values& values, const Text& text) {
  std::string out;
  for (const auto& value : values) out += (out.empty() ? "(" : "|") + text(value);
  return out + ")";
}

// PEFT's target_modules: names, or for a wrapped base a regular expression of whole paths, since its towers
// have modules of these names, too; layers are part of it then.
Json target_modules(const AdapterSpec& spec, bool wrapped) {
  std::vector<std::string> targets = spec.targets;
  std::ranges::sort(targets);
  if (!wrapped) return targets;
  const auto is_path = [&](const std::string& name) { return wrapped_name(name) != name; };
  if (std::ranges::all_of(targets, is_path)) {
    for (std::string& name : targets) name = wrapped_name(name);
    return targets;
  }
  const std::string layers = spec.layers.empty() ? "" : one_of(spec.layers, [](int64_t layer) {
                                                          return std::to_string(layer);
                                                        }) + "\\..*\\.";
  return R"(.*\blanguage_model\..*\.)" + layers + one_of(targets, escaped);
}

template <class T>
Json pattern_of(const std::vector<std::pair<std::string, T>>& values, bool wrapped) {
  Json out = Json::object();
  for (const auto& [name, value] : values) out[peft_name(name, wrapped)] = value;
  return out;
}

// Whether the base's files hold its adapted matrices as [in, out].
bool fan_in_fan_out(const ModelLayout& layout) {
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      if (in_adapter(entry.role) && block.tensors[entry.owner].parameter.parts[entry.part].transposed)
        return true;
    }
  }
  return false;
}

// The adapter of each tensor's module is written with one rank and scale.
class OneForm {
 public:
  // Keeps `spec` where all modules have its rank and alpha, or where `patterns` keeps theirs.
  OneForm(const AdapterSpec& spec, const ModelLayout& layout, bool patterns) : from_(spec), to_(spec) {
    const bool alike = spec.ranks.empty() && spec.alphas.empty();
    changes_ = !alike && !patterns;
    if (changes_) find_common(layout);
    if (!to_.rslora || (!alike && patterns)) return;
    to_.alpha *= std::sqrt(static_cast<double>(to_.r));
    to_.rslora = false;
  }

  const AdapterSpec& spec() const { return to_; }  // as it is written
  bool changes() const { return changes_; }
  // The shape that a tensor is written with.
  void resize(TensorInfo& tensor) const {
    if (changes_ && of_pair(tensor.name)) tensor.shape[is_a(tensor.name) ? 0 : 1] = to_.r;
  }
  // Its values: `tensor` has the written shape, `values` the module's own.
  std::vector<float> filled(const TensorInfo& tensor, const std::vector<float>& values) const {
    if (!of_pair(tensor.name)) return values;
    std::vector<float> out(static_cast<size_t>(tensor.shape[0] * tensor.shape[1]));
    if (is_a(tensor.name)) {
      std::copy(values.begin(), values.end(), out.begin());
      return out;
    }
    const std::string name = canonical_name(tensor.name).text;
    const std::string module = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kB.size());
    const auto rank = static_cast<size_t>(from_.rank_of(module)), all = static_cast<size_t>(to_.r);
    const auto factor = static_cast<float>(to_.scale() == 0 ? 0 : from_.scale_of(module) / to_.scale());
    for (size_t i = 0; i < values.size(); ++i) out[i / rank * all + i % rank] = values[i] * factor;
    return out;
  }

 private:
  static constexpr std::string_view kPrefix = kAdapterPrefix, kA = ".lora_A.weight", kB = ".lora_B.weight";
  static bool is_a(const std::string& name) { return name.ends_with(kA); }
  // A magnitude or a head of scores has no rank, and stays.
  static bool of_pair(const std::string& name) { return is_a(name) || name.ends_with(kB); }

  // The largest rank and the largest scale, so that B becomes no larger.
  void find_common(const ModelLayout& layout) {
    double scale = 0;
    to_.r = 1;
    for (const BlockLayout& block : layout.blocks) {
      for (const Trainable& entry : block.trainables) {
        if (entry.role != TrainableRole::kLoraA) continue;
        const TensorPlace& owner = block.tensors[entry.owner];
        const std::string_view module = module_of(owner.parameter.parts[entry.part].name);
        to_.r = std::max(to_.r, from_.rank_of(module));
        if (std::abs(from_.scale_of(module)) > std::abs(scale)) scale = from_.scale_of(module);
      }
    }
    to_.rslora = false;
    to_.alpha = scale * static_cast<double>(to_.r);
    to_.ranks.clear();
    to_.alphas.clear();
  }

  const AdapterSpec& from_;
  AdapterSpec to_;
  bool changes_ = false;
};

// The keys of every kind.
Json common_config(const BaseModel& base) {
  Json config = {{"base_model_name_or_path", base.name},
                 {"inference_mode", true},
                 // PEFT's two names of a head of scores.
                 {"modules_to_save", base.scores ? Json({"classifier", "score"}) : Json(nullptr)},
                 {"revision", base.revision.empty() ? Json(nullptr) : Json(base.revision)},
                 {"task_type", base.scores ? "SEQ_CLS" : "CAUSAL_LM"}};
  if (!base.architecture.empty())
    config["auto_mapping"] = {{"base_model_class", base.architecture}, {"parent_library", "transformers"}};
  return config;
}

// The adapter's modules, or those with that role alone. Of a wrapped base whole paths: its towers have
// modules of the same names.
std::vector<std::string> modules_of(const AdapterSpec& spec, bool wrapped, const ModelLayout& layout,
                                    std::optional<TrainableRole> role) {
  std::vector<std::string> paths;
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      const bool beside = !in_adapter(entry.role) || entry.role == TrainableRole::kHead;
      if (beside || (role && entry.role != *role)) continue;
      const std::string& weight = block.tensors[entry.owner].parameter.parts[entry.part].name;
      const std::string path = weight.substr(0, weight.rfind('.'));
      if (std::ranges::find(paths, path) == paths.end()) paths.push_back(path);
    }
  }
  std::vector<std::string> out;
  if (wrapped) {
    for (const std::string& path : paths) out.push_back(wrapped_name(path));
  } else {
    for (const std::string& target : spec.targets) {
      const auto named = [&](const std::string& path) { return names_module(target, path); };
      if (std::ranges::any_of(paths, named)) out.push_back(target);
    }
  }
  std::ranges::sort(out);
  return out;
}

// adapter_config.json of IA3 or LN tuning.
Json config_without_pairs(const AdapterSpec& spec, const BaseModel& base, const ModelLayout& layout) {
  Json config = common_config(base);
  config["exclude_modules"] = nullptr;
  config["target_modules"] = modules_of(spec, base.wrapped, layout, std::nullopt);
  config["peft_type"] = spec.kind == AdapterKind::kIa3 ? "IA3" : "LN_TUNING";
  if (spec.kind != AdapterKind::kIa3) return config;
  config["fan_in_fan_out"] = fan_in_fan_out(layout);
  config["feedforward_modules"] = modules_of(spec, base.wrapped, layout, TrainableRole::kInputScale);
  config["init_ia3_weights"] = true;
  return config;
}

// adapter_config.json of prefix or prompt tuning.
Json config_of_virtual_tokens(const AdapterSpec& spec, const BaseModel& base) {
  const bool prefix = spec.kind == AdapterKind::kPrefix;
  const PromptShape& shape = prefix ? base.prefix : base.prompt;
  Json config = common_config(base);
  config.update(Json{{"num_attention_heads", shape.heads},
                     {"num_layers", shape.layers},
                     {"num_transformer_submodules", 1},
                     {"num_virtual_tokens", spec.virtual_tokens},
                     {"peft_type", prefix         ? "PREFIX_TUNING"
                                   : spec.encoded ? "P_TUNING"
                                                  : "PROMPT_TUNING"},
                     {"token_dim", shape.token_dim}});
  if (prefix) {
    config["encoder_hidden_size"] = shape.token_dim;
    config["prefix_projection"] = false;
  } else if (!spec.encoded) {
    config["prompt_tuning_init"] = "RANDOM";
  }
  return config;
}

// adapter_config.json of the adapter as it is written.
Json config_of(const AdapterSpec& spec, const BaseModel& base, const ModelLayout& layout) {
  if (spec.virtual_tokens > 0) return config_of_virtual_tokens(spec, base);
  if (spec.kind != AdapterKind::kLora) return config_without_pairs(spec, base, layout);
  const Json targets = target_modules(spec, base.wrapped);
  const bool names_layers = !spec.layers.empty() && targets.is_array();
  Json config = common_config(base);
  config.update(Json{{"alpha_pattern", pattern_of(spec.alphas, base.wrapped)},
                     {"bias", "none"},
                     {"fan_in_fan_out", fan_in_fan_out(layout)},
                     {"init_lora_weights", true},
                     {"layers_pattern", nullptr},
                     {"layers_to_transform", names_layers ? Json(spec.layers) : Json(nullptr)},
                     {"lora_dropout", spec.dropout},
                     {"peft_type", "LORA"},
                     {"r", spec.r},
                     {"rank_pattern", pattern_of(spec.ranks, base.wrapped)},
                     {"target_modules", targets},
                     {"use_dora", spec.dora},
                     {"use_rslora", spec.rslora}});
  // As an integer if it is one: PEFT declares lora_alpha as int.
  if (spec.alpha == std::floor(spec.alpha) && std::abs(spec.alpha) < 1e15) {
    config["lora_alpha"] = static_cast<int64_t>(spec.alpha);
  } else {
    config["lora_alpha"] = spec.alpha;
  }
  return config;
}

}  // namespace

void write_adapter(const std::string& directory, const AdapterSpec& spec, const BaseModel& base,
                   const ModelLayout& layout, const WeightSource& source, const AdapterForm& form) {
  const OneForm as(spec, layout, form.patterns);
  const Json config = config_of(as.spec(), base, layout);
  NewDirectory output(directory, form.replace);
  const OutgoingTensors tensors(layout, OutgoingTensors::What::kAdapter, DType::kF32, source);
  std::vector<TensorInfo> infos = tensors.tensors();
  for (TensorInfo& info : infos) {
    as.resize(info);
    if (base.wrapped) info.name = wrapped_name(info.name);
  }
  SafetensorsWriter writer(output.temporary() + "/" + kAdapterWeights, std::move(infos));
  for (const TensorInfo& tensor : writer.order()) {
    std::vector<float> values;  // of a tensor that is written otherwise than it is
    tensors.fill(canonical_name(tensor.name).text, [&](std::span<const std::byte> bytes) {
      if (!as.changes()) return writer.write(tensor.name, bytes);
      const auto* const begin = reinterpret_cast<const float*>(bytes.data());
      values.insert(values.end(), begin, begin + bytes.size() / sizeof(float));
    });
    if (!as.changes()) continue;
    const std::vector<float> filled = as.filled(tensor, values);
    writer.write(tensor.name, std::as_bytes(std::span(filled)));
  }
  writer.commit();
  atomic_write_file(output.temporary() + "/" + kAdapterConfig, config.dump(2, ' ', true) + "\n");
  atomic_write_file(output.temporary() + "/README.md", card(as.spec(), base));
  if (!base.directory.empty()) copy_tokenizer_files(base.directory, output.temporary(), base.chat_template);
  output.commit();
}

}  // namespace lm
