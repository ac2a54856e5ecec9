#include "launcher/worker/exported_names.h"

#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "config/config_toml.h"
#include "export/base_files.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"
#include "weights/tensor_names.h"

namespace lm {
namespace {

// Whether the directory's config.json is of a model that holds the text model.
bool is_wrapped(const std::string& directory) {
  constexpr int64_t kMostBytes = 16 << 20;
  const std::string path = directory + "/config.json";
  const Json config = parse_json(read_small_file(path, kMostBytes), path, {.bytes = kMostBytes, .depth = 32});
  return config.is_object() && config.contains("text_config") && config["text_config"].is_object();
}

TensorNames names_of_base(const Config& config) {
  const bool wrapped = is_wrapped(config.model.path);
  if (config.train.method != Method::kFull) {
    if (wrapped) return wrapped_name;
    return [](const std::string& name) { return name; };
  }
  // A model that began with random weights takes nothing from the files.
  const bool fresh = config.model.init == ModelInit::kRandom;
  const auto files = std::make_shared<BaseFiles>(fresh ? "" : config.model.path, wrapped);
  return [files](const std::string& name) { return files->name_of(name); };
}

}  // namespace

TensorNames exported_names(const std::string& run) {
  try {
    Config config = load_config(run + "/config.toml");
    settle_model(config, read_environment());
    return names_of_base(config);
  } catch (const Error&) {
    return [](const std::string& name) { return name; };
  }
}

}  // namespace lm
