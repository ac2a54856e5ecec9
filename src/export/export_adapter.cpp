#include "export/export_adapter.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "export/export_model.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

std::string card(const AdapterSpec& spec, const std::string& base_model, bool scores) {
  std::string out =
      "---\nbase_model: " + Json(base_model).dump(-1, ' ', true) +
      "\nlibrary_name: peft\npipeline_tag: " + (scores ? "text-classification" : "text-generation") +
      "\ntags:\n- lora\n---\n\n";
  out += fmt::format("LoRA adapter, r = {}, target modules:", spec.r);
  for (const std::string& target : spec.targets) out += " " + target;
  return out + ".\n";
}

// PEFT's target_modules: names, or for a wrapped base a regular expression of whole paths, since its towers
// have modules of these names, too.
Json target_modules(std::vector<std::string> targets, bool wrapped) {
  std::ranges::sort(targets);
  if (!wrapped) return targets;
  std::string names;
  for (const std::string& target : targets) {
    names += names.empty() ? "" : "|";
    for (const char c : target) names += c == '.' ? "\\." : std::string(1, c);
  }
  return R"(.*\blanguage_model\..*\.()" + names + ")";
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

}  // namespace

void write_adapter(const std::string& directory, const AdapterSpec& spec, const BaseModel& base,
                   const ModelLayout& layout, const WeightSource& source, bool replace) {
  const double alpha = spec.rslora ? spec.alpha * std::sqrt(static_cast<double>(spec.r)) : spec.alpha;
  Json config = {{"alpha_pattern", Json::object()},
                 {"base_model_name_or_path", base.name},
                 {"bias", "none"},
                 {"fan_in_fan_out", fan_in_fan_out(layout)},
                 {"inference_mode", true},
                 {"init_lora_weights", true},
                 {"layers_pattern", nullptr},
                 {"layers_to_transform", nullptr},
                 {"lora_dropout", spec.dropout},
                 // PEFT's two names of such a head.
                 {"modules_to_save", base.scores ? Json({"classifier", "score"}) : Json(nullptr)},
                 {"peft_type", "LORA"},
                 {"r", spec.r},
                 {"rank_pattern", Json::object()},
                 {"revision", base.revision.empty() ? Json(nullptr) : Json(base.revision)},
                 {"target_modules", target_modules(spec.targets, base.wrapped)},
                 {"task_type", base.scores ? "SEQ_CLS" : "CAUSAL_LM"},
                 {"use_dora", false},
                 {"use_rslora", false}};
  // As an integer if it is one: PEFT declares lora_alpha as int.
  if (alpha == std::floor(alpha) && std::abs(alpha) < 1e15) {
    config["lora_alpha"] = static_cast<int64_t>(alpha);
  } else {
    config["lora_alpha"] = alpha;
  }
  if (!base.architecture.empty())
    config["auto_mapping"] = {{"base_model_class", base.architecture}, {"parent_library", "transformers"}};
  NewDirectory output(directory, replace);
  const OutgoingTensors tensors(layout, OutgoingTensors::What::kAdapter, DType::kF32, source);
  std::vector<TensorInfo> infos = tensors.tensors();
  if (base.wrapped) {
    for (TensorInfo& info : infos) info.name = wrapped_name(info.name);
  }
  SafetensorsWriter writer(output.temporary() + "/" + kAdapterWeights, std::move(infos));
  for (const TensorInfo& tensor : writer.order()) {
    tensors.fill(canonical_name(tensor.name).text,
                 [&](std::span<const std::byte> bytes) { writer.write(tensor.name, bytes); });
  }
  writer.commit();
  atomic_write_file(output.temporary() + "/" + kAdapterConfig, config.dump(2, ' ', true) + "\n");
  atomic_write_file(output.temporary() + "/README.md", card(spec, base.name, base.scores));
  if (!base.directory.empty()) copy_tokenizer_files(base.directory, output.temporary(), base.chat_template);
  output.commit();
}

}  // namespace lm
