#include "export/export_model.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "export/base_files.h"
#include "weights/verify.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCopied[] = {"generation_config.json",
                                   "tokenizer.json",
                                   "tokenizer_config.json",
                                   "tokenizer.model",
                                   "chat_template.jinja",
                                   "chat_template.json",
                                   "special_tokens_map.json",
                                   "added_tokens.json",
                                   "vocab.json",
                                   "merges.txt",
                                   "tekken.json",
                                   "processor_config.json",
                                   "preprocessor_config.json",
                                   "image_preprocessor_config.json",
                                   "video_preprocessor_config.json",
                                   "audio_preprocessor_config.json"};
constexpr int64_t kMostConfigBytes = int64_t{4} << 20;
constexpr int64_t kMostCopiedBytes = int64_t{256} << 20;

void copy_file(const std::string& from, const std::string& to) {
  std::error_code error;
  if (!fs::exists(from, error)) return;
  atomic_write_file(to, read_small_file(from, kMostCopiedBytes));
}

// Changes what one object says of its weights; whether it had a key for their type goes to `found`.
bool set_dtype(Json& config, const char* name, bool& found) {
  bool changed = config.erase("quantization_config") > 0;  // of a quantized base: the output is unquantized
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto it = config.find(key);
    if (it == config.end()) continue;
    found = true;
    changed = changed || *it != name;
    *it = name;
  }
  return changed;
}

Json* text_config(Json& config) {
  const auto it = config.find("text_config");
  return it != config.end() && it->is_object() ? &*it : nullptr;
}

Json read_config(const std::string& text, const std::string& place) {
  Json config = parse_json(text, place, {.bytes = kMostConfigBytes, .depth = 32});
  if (!config.is_object()) fail_json("config.json must hold one object", place, 0);
  return config;
}

// Whether a model cannot be written without the base's weights: else damaged ones shall not keep it from
// being written.
bool needs_files(const ModelLayout& layout) {
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (place.parameter.kind == ParameterKind::kBuffer) return true;
      // GPT-2, of which there are files with other names.
      if (place.parameter.parts.front().name.starts_with("transformer.")) return true;
    }
  }
  return false;
}

struct OpenedBase {
  BaseFiles files;
  std::string problem = {};  // why there are no files; "": none
};

// What stays of the base: nothing where the weights are not its own.
OpenedBase base_files(const std::string& directory, const ModelLayout& layout, const ExportOptions& options) {
  const std::string path = directory + "/config.json";
  std::error_code absent;
  Json config = !directory.empty() && fs::exists(path, absent)
                    ? read_config(read_small_file(path, kMostConfigBytes), path)
                    : Json::object();
  const bool wrapped = text_config(config) != nullptr;
  const std::string of = options.fresh ? "" : directory;
  if (wrapped || needs_files(layout)) return {BaseFiles(of, wrapped)};
  try {
    return {BaseFiles(of, wrapped)};
  } catch (const Error& error) {
    return {BaseFiles("", wrapped), error.what()};
  }
}

OutgoingTensors outgoing_tensors(const ModelLayout& layout, const WeightSource& source,
                                 const ExportOptions& options, const BaseFiles& base) {
  return {layout, OutgoingTensors::What::kModel, options.dtype, source,
          base.own_types(layout, options.dtype)};
}

// A tensor's bytes by its name in the files.
void fill(const BaseFiles& base, const OutgoingTensors& tensors, const std::string& theirs,
          const TensorSink& sink) {
  const std::string name = canonical_name(theirs).text;
  base.copies(name) ? base.copy(name, sink) : tensors.fill(name, sink);
}

}  // namespace

std::string config_for_dtype(const std::string& text, DType dtype, const std::string& place) {
  Json config = read_config(text, place);
  const char* const name = dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
  bool found = false;
  bool changed = set_dtype(config, name, found);
  if (Json* const inner = text_config(config)) changed = set_dtype(*inner, name, found) || changed;
  // Neither key: the older one, unless the file is in the newer form otherwise.
  if (!found) config[config.contains("rope_parameters") ? "dtype" : "torch_dtype"] = name;
  return changed || !found ? config.dump(2) + "\n" : text;
}

std::string config_for_scores(const std::string& text, const ModelSpec& spec, const std::string& place) {
  Json config = read_config(text, place);
  const ScoreHead& head = spec.score;
  Json names = Json::object(), ids = Json::object();
  for (size_t i = 0; i < head.labels.size(); ++i) {
    names[std::to_string(i)] = head.labels[i];
    ids[head.labels[i]] = i;
  }
  config["architectures"] = {spec.architecture};
  config["id2label"] = names;
  config["label2id"] = ids;
  config["problem_type"] = problem_name(head.problem);
  config.erase("num_labels");
  if (head.pad_token >= 0) config["pad_token_id"] = head.pad_token;
  return config.dump(2) + "\n";
}

std::string export_hash(const std::string& base_directory, const ModelLayout& layout,
                        const WeightSource& source, const ExportOptions& options) {
  BaseFiles base = base_files(base_directory, layout, options).files;
  const OutgoingTensors tensors = outgoing_tensors(layout, source, options, base);
  std::vector<TensorInfo> all = base.outgoing(tensors.tensors(), layout, options.unread);
  std::ranges::sort(all, {}, &TensorInfo::name);
  WeightsHash hash;
  for (const TensorInfo& tensor : all) {
    hash.tensor(tensor.name, tensor.dtype, tensor.shape);
    fill(base, tensors, tensor.name, [&](std::span<const std::byte> bytes) { hash.bytes(bytes); });
  }
  return hash.hex();
}

std::vector<TensorInfo> exported_tensors(const std::string& base_directory, const ModelLayout& layout,
                                         const ExportOptions& options) {
  BaseFiles base = base_files(base_directory, layout, options).files;
  return base.outgoing(outgoing_tensors(layout, {}, options, base).tensors(), layout, options.unread);
}

bool takes_from_base(const std::string& base_directory, const ModelLayout& layout,
                     const ExportOptions& options) {
  const OutgoingTensors own(layout, OutgoingTensors::What::kModel, options.dtype, {});
  const auto alike = [](const TensorInfo& a, const TensorInfo& b) {
    return a.name == b.name && a.dtype == b.dtype;
  };
  return !std::ranges::equal(exported_tensors(base_directory, layout, options), own.tensors(), alike);
}

int64_t tokenizer_bytes(const std::string& from) {
  int64_t bytes = 0;
  const auto add = [&](const fs::path& file) {
    std::error_code absent;
    const auto size = fs::file_size(file, absent);
    if (!absent) bytes += static_cast<int64_t>(size);
  };
  for (const char* name : kCopied) add(from + "/" + name);
  std::error_code absent;
  for (const auto& file : fs::directory_iterator(from + "/additional_chat_templates", absent))
    add(file.path());
  return bytes;
}

void copy_tokenizer_files(const std::string& from, const std::string& to, const std::string& chat_template) {
  for (const char* name : kCopied) copy_file(from + "/" + name, to + "/" + name);
  const std::string templates = "additional_chat_templates";
  std::error_code error;
  if (!chat_template.empty()) return atomic_write_file(to + "/chat_template.jinja", chat_template);
  if (!fs::is_directory(from + "/" + templates, error)) return;
  fs::create_directory(to + "/" + templates, error);
  for (const auto& file : fs::directory_iterator(from + "/" + templates, error)) {
    if (file.path().extension() == ".jinja")
      copy_file(file.path().string(), to + "/" + templates + "/" + file.path().filename().string());
  }
}

void export_model(const std::string& output, const std::string& base_directory, const ModelLayout& layout,
                  const WeightSource& source, const ExportOptions& options) {
  const std::string config_path = base_directory + "/config.json";
  std::string config =
      config_for_dtype(read_small_file(config_path, kMostConfigBytes), options.dtype, config_path);
  if (options.scores != nullptr) config = config_for_scores(config, *options.scores, config_path);
  auto [base, problem] = base_files(base_directory, layout, options);
  if (!problem.empty())
    log_note("FILE-23", std::string("the base model's weights cannot be read: each tensor is written in ") +
                            dtype_name(options.dtype) + ", whatever type it came in: " + problem);
  const OutgoingTensors tensors = outgoing_tensors(layout, source, options, base);
  const std::vector<TensorInfo> all = base.outgoing(tensors.tensors(), layout, options.unread);
  NewDirectory directory(output, options.replace);
  write_model_files(
      directory.temporary(), all,
      [&](const std::string& name, const TensorSink& sink) { fill(base, tensors, name, sink); },
      options.part_bytes);
  copy_tokenizer_files(base_directory, directory.temporary(), options.chat_template);
  atomic_write_file(directory.temporary() + "/config.json", config);
  directory.commit();
}

}  // namespace lm
