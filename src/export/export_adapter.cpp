#include "export/export_adapter.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "export/export_model.h"
#include "export/target_parameters.h"
#include "spec/adapter_sites.h"
#include "weights/adapter_files.h"
#include "weights/model_files.h"
#include "weights/saved_modules.h"
#include "weights/verify.h"

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
  if (!spec.also.empty()) out += fmt::format("; {} modules of the model are trained whole", spec.also.size());
  if (!spec.tokens.empty()) out += fmt::format("; rows of {} tokens are trained", spec.tokens.size());
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
Json target_modules(const AdapterSpec& spec, const BaseModel& base, const TargetParameters& parameters) {
  std::vector<std::string> targets = spec.targets;
  std::erase_if(targets, [&](const std::string& target) { return parameters.names(target); });
  std::ranges::sort(targets);
  if (!base.wrapped) return targets;
  // The head is beside the text model, and the embedding no layer's.
  const std::string head = base.spec == nullptr ? "" : base.spec->names.head;
  const std::string table = base.spec == nullptr ? "" : base.spec->names.embedding;
  const bool adapts_head = std::erase(targets, head) > 0;
  const bool adapts_table = std::erase(targets, table.substr(table.rfind('.') + 1)) > 0;
  const auto is_path = [&](const std::string& name) { return wrapped_name(name) != name; };
  if (std::ranges::all_of(targets, is_path)) {
    for (std::string& name : targets) name = wrapped_name(name);
    if (adapts_head) targets.push_back(head);
    if (adapts_table) targets.push_back(wrapped_name(table));
    return targets;
  }
  const std::string layers = spec.layers.empty() ? "" : one_of(spec.layers, [](int64_t layer) {
                                                          return std::to_string(layer);
                                                        }) + "\\..*\\.";
  return R"(.*\blanguage_model\..*\.)" + layers + one_of(targets, escaped) +
         (adapts_head ? "|" + escaped(head) : "") + (adapts_table ? "|" + escaped(wrapped_name(table)) : "");
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
      if (in_adapter(entry.role) && block.owner_of(entry).parts[entry.part].transposed) return true;
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
  // Whether a tensor is written otherwise than it is.
  bool changes(const TensorInfo& tensor) const { return changes_ && of_pair(tensor.name); }
  // The shape that a tensor is written with.
  void resize(TensorInfo& tensor) const {
    if (!changes_ || !of_pair(tensor.name)) return;
    tensor.shape[is_a(tensor.name) ? 0 : 1] = to_.r * pairs_.at(canonical_name(tensor.name).text).experts;
  }
  // The values of one that changes: `tensor` has the written shape, `values` the module's own.
  std::vector<float> filled(const TensorInfo& tensor, const std::vector<float>& values) const {
    std::vector<float> out(static_cast<size_t>(tensor.shape[0] * tensor.shape[1]));
    const auto& [site, experts] = pairs_.at(canonical_name(tensor.name).text);
    const auto count = static_cast<size_t>(experts);
    if (is_a(tensor.name)) {  // of experts one behind another
      const size_t own = values.size() / count, all = out.size() / count;
      for (size_t e = 0; e < count; ++e) std::copy_n(values.data() + e * own, own, out.data() + e * all);
      return out;
    }
    // Of experts beside each other: what fills them up is at the end of a row all the same.
    const size_t rank = static_cast<size_t>(from_.rank_of(site)) * count;
    const size_t all = static_cast<size_t>(to_.r) * count;
    const auto factor = static_cast<float>(to_.scale() == 0 ? 0 : from_.scale_of(site) / to_.scale());
    for (size_t i = 0; i < values.size(); ++i) out[i / rank * all + i % rank] = values[i] * factor;
    return out;
  }

 private:
  static constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight",
                                    kEmbeddingA = ".lora_embedding_A", kEmbeddingB = ".lora_embedding_B";
  static bool is_a(const std::string& name) { return name.ends_with(kA) || name.ends_with(kEmbeddingA); }
  // A magnitude, or what is trained whole, has no rank, and stays.
  static bool of_pair(const std::string& name) {
    return is_a(name) || name.ends_with(kB) || name.ends_with(kEmbeddingB);
  }

  // The largest rank and the largest scale, so that B becomes no larger.
  void find_common(const ModelLayout& layout) {
    double scale = 0;
    to_.r = 1;
    for (const BlockLayout& block : layout.blocks) {
      for (const Trainable& entry : block.trainables) {
        const Parameter& parameter = block.tensors[entry.tensor].parameter;
        const std::string& module = parameter.site;
        if (entry.role == TrainableRole::kLoraA || entry.role == TrainableRole::kLoraB)
          for (const ParameterPart& part : parameter.parts)
            pairs_[part.tensor()] = {module, std::max(part.slices, part.step)};
        if (entry.role != TrainableRole::kLoraA) continue;
        to_.r = std::max(to_.r, from_.rank_of(module));
        if (std::abs(from_.scale_of(module)) > std::abs(scale)) scale = from_.scale_of(module);
      }
    }
    to_.rslora = false;
    to_.alpha = scale * static_cast<double>(to_.r);
    to_.ranks.clear();
    to_.alphas.clear();
  }

  struct Pair {
    std::string site;
    int64_t experts = 1;
  };
  const AdapterSpec& from_;
  AdapterSpec to_;
  std::map<std::string, Pair, std::less<>> pairs_;  // by the tensor's name; where something changes
  bool changes_ = false;
};

// PEFT's modules_to_save.
Json saved_entries(const BaseModel& base, const SavedModules& saved) {
  std::vector<std::string> out = saved.entries;
  // PEFT's two names of a head of scores.
  if (base.scores) out.insert(out.end(), {"classifier", "score"});
  return out.empty() ? Json(nullptr) : Json(out);
}

// The keys of every kind.
Json common_config(const BaseModel& base, const SavedModules& saved = {}) {
  Json config = {{"base_model_name_or_path", base.name},
                 {"inference_mode", true},
                 {"modules_to_save", saved_entries(base, saved)},
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
      const bool beside = !in_adapter(entry.role) || entry.role == TrainableRole::kWhole ||
                          entry.role == TrainableRole::kTokenRows;
      if (beside || (role && entry.role != *role)) continue;
      const std::string& weight = block.owner_of(entry).parts[entry.part].name;
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
  const PromptShape shape = prompt_shape(*base.spec, spec.kind);
  Json config = common_config(base, {});
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

// What an adapter's file calls the weight of a module that is trained whole.
std::string adapter_tensor(const std::string& module) {
  return std::string(kAdapterPrefix) + module + ".weight";
}

// adapter_config.json of the adapter as it is written.
Json config_of(const AdapterSpec& spec, const BaseModel& base, const ModelLayout& layout,
               const SavedModules& saved) {
  if (spec.virtual_tokens > 0) return config_of_virtual_tokens(spec, base);
  if (spec.kind != AdapterKind::kLora) return config_without_pairs(spec, base, layout);
  const TargetParameters parameters(layout);
  const Json targets = target_modules(spec, base, parameters);
  const bool names_layers = !spec.layers.empty() && targets.is_array();
  Json config = common_config(base, saved);
  config.update(Json{{"alpha_pattern", pattern_of(spec.alphas, base.wrapped)},
                     {"bias", kAdapterBiasNames[static_cast<size_t>(spec.bias)]},
                     {"ensure_weight_tying", saved.ensures_tying},
                     {"fan_in_fan_out", fan_in_fan_out(layout)},
                     {"init_lora_weights", true},
                     {"layers_pattern", nullptr},
                     {"layers_to_transform", names_layers ? Json(spec.layers) : Json(nullptr)},
                     {"lora_dropout", spec.dropout},
                     {"peft_type", "LORA"},
                     {"r", spec.r},
                     {"rank_pattern", pattern_of(spec.ranks, base.wrapped)},
                     {"target_modules", targets},
                     {"target_parameters", parameters.names_for_peft(spec, base.wrapped)},
                     {"trainable_token_indices", spec.tokens.empty() ? Json(nullptr) : Json(spec.tokens)},
                     {"use_dora", spec.dora},
                     {"use_rslora", spec.rslora}});
  // As an integer if it is one: PEFT declares lora_alpha as int.
  if (spec.alpha == std::floor(spec.alpha) && std::abs(spec.alpha) < 1e15) {
    config["lora_alpha"] = static_cast<int64_t>(spec.alpha);
  } else {
    config["lora_alpha"] = spec.alpha;
  }
  // Of the layout: earlier ones have A and B of experts' parameters turned.
  if (!config["target_parameters"].is_null()) config["peft_version"] = "0.21.2";
  return config;
}

// A matrix of the base in the adapter's file.
struct CopiedMatrix {
  std::string name;  // of the adapter's tensor
  ModelFiles::Tensor tensor;
};

// What PEFT calls the base's matrix in a file: layers of its own are around it where something of it is
// trained.
std::string name_of_copy(const std::string& path, const ModelLayout& layout) {
  std::string end = ".weight";
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      if (block.tensors[entry.tensor].parameter.owner != path + ".weight") continue;
      if (entry.role == TrainableRole::kTokenRows) end = ".token_adapter.base_layer.weight";
      if (entry.role == TrainableRole::kLoraA) end = ".base_layer.weight";
    }
  }
  return std::string(kAdapterPrefix) + path + end;
}

// Those that are not trained whole, of a base with new tokens.
std::vector<CopiedMatrix> copied_matrices(const AdapterSpec& spec, const BaseModel& base,
                                          const ModelLayout& layout, const ModelFiles& files) {
  std::vector<CopiedMatrix> out;
  const ModelSpec& model = *base.spec;
  for (const char* const path : {model.names.embedding, model.names.head}) {
    const std::string weight = path + std::string(".weight");
    const bool shared = path == model.names.head && (model.tied || model.scores());
    const auto tensor = files.find(weight);
    if (shared || spec.trains_whole(weight) || !tensor) continue;
    out.push_back({name_of_copy(path, layout), *tensor});
  }
  return out;
}

void copy_tensor(const CopiedMatrix& matrix, const TensorSink& sink) {
  constexpr int64_t kAtOnce = int64_t{4} << 20;
  const int64_t bytes = matrix.tensor.entry->bytes();
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(kAtOnce, bytes)));
  for (int64_t offset = 0; offset < bytes; offset += kAtOnce) {
    const auto piece = std::span(buffer).first(static_cast<size_t>(std::min(kAtOnce, bytes - offset)));
    matrix.tensor.file->read(*matrix.tensor.entry, offset, piece);
    sink(piece);
  }
}

SavedModules modules_saved_by(const AdapterSpec& spec, const BaseModel& base) {
  LM_CHECK(spec.also.empty() || base.spec != nullptr, "the base of modules that are trained whole");
  return spec.also.empty() ? SavedModules() : saved_modules(*base.spec, spec.also);
}

// The tensors of an adapter's file. Borrows all but what it opens.
class AdapterTensors {
 public:
  AdapterTensors(const AdapterSpec& spec, const BaseModel& base, const ModelLayout& layout,
                 const WeightSource& source, const OneForm& as)
      : as_(as), tensors_(layout, OutgoingTensors::What::kAdapter, DType::kF32, source) {
    infos_ = tensors_.tensors();
    if (modules_saved_by(spec, base).copies_head) {
      of_embedding_ = adapter_tensor(base.spec->names.embedding);
      of_head_ = adapter_tensor(base.spec->names.head);
      infos_.push_back(*std::ranges::find(infos_, of_embedding_, &TensorInfo::name));
      infos_.back().name = of_head_;
    }
    if (base.grown) {
      files_ = std::make_unique<ModelFiles>(base.directory);
      copies_ = copied_matrices(spec, base, layout, *files_);
    }
    for (const CopiedMatrix& copy : copies_)
      infos_.push_back({copy.name, copy.tensor.entry->dtype, copy.tensor.entry->shape});
    for (TensorInfo& info : infos_) {
      as_.resize(info);
      if (base.wrapped) info.name = wrapped_name(info.name);
    }
  }

  const std::vector<TensorInfo>& infos() const { return infos_; }

  // The bytes of one of them.
  void fill(const TensorInfo& tensor, const TensorSink& sink) const {
    const std::string name = canonical_name(tensor.name).text;
    const auto copy = std::ranges::find(copies_, name, &CopiedMatrix::name);
    if (copy != copies_.end()) return copy_tensor(*copy, sink);
    const std::string& from = name == of_head_ ? of_embedding_ : name;
    if (!as_.changes(tensor)) return tensors_.fill(from, sink);
    std::vector<float> values;
    tensors_.fill(from, [&](std::span<const std::byte> bytes) {
      const auto* const begin = reinterpret_cast<const float*>(bytes.data());
      values.insert(values.end(), begin, begin + bytes.size() / sizeof(float));
    });
    const std::vector<float> filled = as_.filled(tensor, values);
    sink(std::as_bytes(std::span(filled)));
  }

 private:
  const OneForm& as_;
  OutgoingTensors tensors_;
  std::string of_embedding_, of_head_;  // a tied head is written as the embedding; "": there is none
  std::unique_ptr<ModelFiles> files_;   // null: nothing is copied
  std::vector<CopiedMatrix> copies_;
  std::vector<TensorInfo> infos_;
};

}  // namespace

std::string adapter_hash(const AdapterSpec& spec, const BaseModel& base, const ModelLayout& layout,
                         const WeightSource& source) {
  const OneForm as(spec, layout, true);
  const AdapterTensors tensors(spec, base, layout, source, as);
  std::vector<TensorInfo> infos = tensors.infos();
  std::ranges::sort(infos, {}, &TensorInfo::name);
  WeightsHash hash;
  for (const TensorInfo& tensor : infos) {
    hash.tensor(tensor.name, tensor.dtype, tensor.shape);
    tensors.fill(tensor, [&](std::span<const std::byte> bytes) { hash.bytes(bytes); });
  }
  return hash.hex();
}

void write_adapter(const std::string& directory, const AdapterSpec& spec, const BaseModel& base,
                   const ModelLayout& layout, const WeightSource& source, const AdapterForm& form) {
  const OneForm as(spec, layout, form.patterns);
  const Json config = config_of(as.spec(), base, layout, modules_saved_by(spec, base));
  NewDirectory output(directory, form.replace);
  const AdapterTensors tensors(spec, base, layout, source, as);
  SafetensorsWriter writer(output.temporary() + "/" + kAdapterWeights, tensors.infos());
  for (const TensorInfo& tensor : writer.order())
    tensors.fill(tensor, [&](std::span<const std::byte> bytes) { writer.write(tensor.name, bytes); });
  writer.commit();
  atomic_write_file(output.temporary() + "/" + kAdapterConfig, config.dump(2, ' ', true) + "\n");
  atomic_write_file(output.temporary() + "/README.md", card(as.spec(), base));
  if (!base.directory.empty()) copy_tokenizer_files(base.directory, output.temporary(), base.chat_template);
  output.commit();
}

}  // namespace lm
