#include "config/words/translate.h"

#include <algorithm>

#include "base/error.h"
#include "config/words/draft.h"
#include "config/words/values.h"

namespace lm {
namespace {

using Json = nlohmann::json;

bool has(const Json& content, std::initializer_list<const char*> keys) {
  return std::ranges::any_of(keys, [&](const char* key) { return content.contains(key); });
}

bool has_components(const Json& content) {
  return std::ranges::any_of(
      content, [](const Json& value) { return value.is_object() && value.contains("_component_"); });
}

bool holds_tables(const Json& value) {
  return value.is_array() && !value.empty() &&
         std::ranges::all_of(value, [](const Json& one) { return one.is_object(); });
}

// "${output_dir}/logs" as OmegaConf reads it, for values of the file itself.
std::string interpolated(std::string text, const Json& root) {
  for (int rounds = 0; rounds < 16; ++rounds) {
    const size_t begin = text.find("${"), end = text.find('}', begin);
    const bool closed = begin != std::string::npos && end != std::string::npos;
    if (!closed || text.find('~', begin) < end) break;
    std::string path = "/" + text.substr(begin + 2, end - begin - 2);
    std::ranges::replace(path, '.', '/');
    const Json::json_pointer pointer(path);
    if (!root.contains(pointer) || root[pointer].is_structured() || root[pointer].is_null()) break;
    const Json& value = root[pointer];
    text.replace(begin, end - begin + 1, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

class Walk {
 public:
  Walk(const Json& root, Draft& draft) : root_(root), draft_(draft) {}

  void tables(const Json& content, const std::string& path) {
    for (const auto& [key, value] : content.items()) one(path.empty() ? key : path + "." + key, value);
  }

 private:
  void one(const std::string& path, const Json& value) {
    const bool inner = has_inner_words(draft_.project, path);
    if (inner && value.is_object() && !value.empty()) return tables(value, path);
    if (inner && holds_tables(value)) {
      for (const Json& entry : value) {
        if (path.find("test_") == std::string::npos) draft_.sources.emplace_back();
        tables(entry, path);
      }
      return;
    }
    leaf(path, value, inner);
  }

  void leaf(const std::string& path, const Json& value, bool inner) {
    const Word* word = find_word(draft_.project, path);
    draft_.at = path;
    draft_.done = false;
    if (word == nullptr && !(inner && is_off(value))) {
      draft_.out.unknown.push_back(path);
      return;
    }
    const Json read = value.is_string() ? Json(interpolated(value.get<std::string>(), root_)) : value;
    // torchtune's null is a choice: gradients are not clipped.
    const bool chosen =
        !read.is_null() || (draft_.project == Project::kTorchtune && path == "clip_grad_norm");
    if (word != nullptr && chosen) carry(*word, read, draft_);
    if (!draft_.done) draft_.out.off.push_back(path);
  }

  const Json& root_;
  Draft& draft_;
};

}  // namespace

Project project_of(const Json& content) {
  if (has_components(content)) return Project::kTorchtune;
  if (has(content, {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}))
    return Project::kDeepSpeed;
  if (has(content, {"compute_environment", "distributed_type"})) return Project::kAccelerate;
  if (has(content, {"base_model"})) return Project::kAxolotl;
  if (has(content, {"peft_type"})) return Project::kPeft;
  if (has(content, {"finetuning_type", "stage", "cutoff_len", "template", "model_class", "infer_backend",
                    "export_dir"}))
    return Project::kLlamaFactory;
  return Project::kTrainer;
}

Translated translate(const std::vector<ForeignFile>& files, const std::string& model,
                     const std::vector<std::string>& data) {
  Draft draft;
  for (const ForeignFile& file : files) {
    if (!file.content.is_object() || file.content.empty())
      throw Error(Exit::kInput,
                  {.area = "INIT-22",
                   .what = "this file has no keys at its top level",
                   .place = file.place,
                   .next = "name the YAML or JSON file that the other trainer is started with"});
    draft.place = file.place;
    draft.project = project_of(file.content);
    draft.out.projects.push_back(draft.project);
    Walk(file.content, draft).tables(file.content, "");
    // Their defaults.
    const bool adapters = draft.project == Project::kPeft || draft.project == Project::kLlamaFactory;
    if (adapters && !draft.method) draft.method = "lora";
  }
  return settle(std::move(draft), model, data);
}

}  // namespace lm
