#include "export/export_model.h"

#include <filesystem>

#include "base/json.h"

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
                                   "preprocessor_config.json"};
constexpr int64_t kMostConfigBytes = int64_t{4} << 20;
constexpr int64_t kMostCopiedBytes = int64_t{256} << 20;

void copy_file(const std::string& from, const std::string& to) {
  std::error_code error;
  if (!fs::exists(from, error)) return;
  atomic_write_file(to, read_small_file(from, kMostCopiedBytes));
}

}  // namespace

std::string config_for_dtype(const std::string& text, DType dtype, const std::string& place) {
  Json config = parse_json(text, place, {.bytes = kMostConfigBytes, .depth = 32});
  if (!config.is_object()) fail_json("config.json must hold one object", place, 0);
  const char* const name = dtype == DType::kF32 ? "float32" : "bfloat16";
  bool changed = config.erase("quantization_config") > 0,
       found = false;  // of a quantized base: the output is unquantized
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto it = config.find(key);
    if (it == config.end()) continue;
    found = true;
    changed = changed || *it != name;
    *it = name;
  }
  // Neither key: the older one, unless the file is in the newer form otherwise.
  if (!found) config[config.contains("rope_parameters") ? "dtype" : "torch_dtype"] = name;
  return changed || !found ? config.dump(2) + "\n" : text;
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
  const std::string config =
      config_for_dtype(read_small_file(config_path, kMostConfigBytes), options.dtype, config_path);
  NewDirectory directory(output, options.replace);
  const OutgoingTensors tensors(layout, OutgoingTensors::What::kModel, options.dtype, source);
  write_model_files(
      directory.temporary(), tensors.tensors(),
      [&](const std::string& name, const TensorSink& sink) { tensors.fill(name, sink); }, options.part_bytes);
  copy_tokenizer_files(base_directory, directory.temporary(), options.chat_template);
  atomic_write_file(directory.temporary() + "/config.json", config);
  directory.commit();
}

}  // namespace lm
