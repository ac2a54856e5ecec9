#include "launcher/model_place.h"

#include <filesystem>
#include <string_view>

#include "base/error.h"
#include "base/hub_snapshot.h"
#include "config/config_text.h"
#include "launcher/recorded.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

bool holds(const fs::path& directory, const char* file) {
  std::error_code ignored;
  return fs::exists(directory / file, ignored);
}

bool is_model(const fs::path& directory) {
  return holds(directory, "config.json");
}

// "ORG/NAME" -> "models--ORG--NAME"; "" when it is not of that form.
std::string hub_directory(const std::string& path) {
  const size_t slash = path.find('/');
  if (slash == std::string::npos) return "";
  const std::string_view org = std::string_view(path).substr(0, slash),
                         name = std::string_view(path).substr(slash + 1);
  if (!plain_name(org) || !plain_name(name)) return "";
  return "models--" + std::string(org) + "--" + std::string(name);
}

Error refusal(const std::string& what, const std::string& place, const std::string& next) {
  return Error(Exit::kInput, {.area = "FILE-21", .what = what, .place = place, .next = next});
}

// The model that an adapter is for, as it names it.
std::string base_of(const std::string& adapter) {
  const std::string base = read_adapter_config(adapter, nullptr).base_model;
  if (!base.empty()) return base;
  throw refusal("the adapter does not name the model that it is for", adapter + "/" + kAdapterConfig,
                "set base_model_name_or_path there");
}

// Of a name that may be ORG/NAME: a directory of it that is gone, or was never here, has its parent left.
bool names_directory(const std::string& path) {
  std::error_code ignored;
  return hub_directory(path).empty() || fs::is_directory(path.substr(0, path.find('/')), ignored);
}

bool named_by(const std::string& adapter, const std::string& model) {
  return !adapter.empty() && holds_adapter(adapter) &&
         read_adapter_config(adapter, nullptr).base_model == model;
}

// An adapter's model that is not where the adapter says.
Error moved_base(const std::string& model, const std::string& adapter) {
  std::string next = "set base_model_name_or_path there to where the model is now";
  if (!names_directory(model)) next += ", or download it: `hf download " + model + "`";
  return refusal("the model that this adapter is for is not here: \"" + model + "\"",
                 adapter + "/" + kAdapterConfig, next);
}

constexpr const char* kWhyConfig =
    "; a plan is made from its config.json, which says the model's shape and the size of its vocabulary";

// Of a directory that holds no model: what it is, and how there can be one.
Error other_directory(const std::string& path) {
  const std::string directory = model_directory(path), exported = "lmlaunch export " + path;
  if (holds_adapter(directory)) {
    return refusal("this is an adapter of \"" + base_of(directory) + "\", and no whole model", path,
                   "set train.method = \"lora\" or \"qlora\" to go on with it, or add it into its model: " +
                       exported + " --merge -o DIR");
  }
  if (run_of(path) == path) {
    return refusal("this run has no trained model yet", path,
                   "let it finish: lmlaunch " + path +
                       "/config.toml, or take its newest checkpoint: " + exported + " -o DIR");
  }
  if (holds(path, kManifestName)) {
    return refusal("this is a checkpoint, with which only its own run goes on", path,
                   "make a model of it: " + exported + " -o DIR");
  }
  return refusal("model.path is a directory without a config.json", path,
                 std::string("give a Hugging Face model directory (config.json, *.safetensors, "
                             "tokenizer.json)") +
                     kWhyConfig);
}

}  // namespace

std::string model_directory(const std::string& place) {
  const auto whole = [](const fs::path& at) { return is_model(at) || holds_adapter(at.string()); };
  if (whole(place) || run_of(place) != place) return place;
  const fs::path trained = fs::path(place) / "model";
  return whole(trained) ? trained.string() : place;
}

bool holds_adapter(const std::string& directory) {
  return holds(directory, kAdapterConfig);
}

void settle_model(Config& config) {
  std::string &model = config.model.path, &adapter = config.lora.init;
  if (!adapter.empty()) adapter = model_directory(adapter);
  const std::string meant = model_directory(model);
  if (!holds_adapter(meant)) {
    model = meant;
    return;
  }
  if (config.train.method != Method::kLora) return;
  std::error_code ignored;
  if (!adapter.empty() && !fs::equivalent(adapter, meant, ignored)) {
    throw Error(Exit::kConfig, {.area = "CONF-20",
                                .what = "model.path is an adapter, and lora.init = " + value_text(adapter) +
                                        " names another one",
                                .place = model,
                                .next = "set model.path = " + value_text(base_of(meant)) +
                                        ", and lora.init to the adapter that is to be continued",
                                .kept = "nothing was started or written"});
  }
  adapter = meant;
  model = base_of(meant);
}

bool model_is_here(const std::string& path, const Environment& environment) {
  std::error_code ignored;
  if (fs::exists(path, ignored)) return true;
  const std::string name = hub_directory(path);
  return !name.empty() && std::ranges::any_of(environment.hub_caches, [&](const std::string& cache) {
    return !hub_snapshot(fs::path(cache) / name, is_model).empty();
  });
}

std::string resolve_model(const std::string& path, const Environment& environment,
                          const std::string& adapter) {
  const std::string directory = model_directory(path);
  if (is_model(directory)) return directory;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) throw other_directory(path);
  const std::string name = hub_directory(path);
  if (name.empty()) {
    if (named_by(adapter, path)) throw moved_base(path, adapter);
    throw refusal(
        "model.path does not exist", path,
        std::string("give a Hugging Face model directory, or ORG/NAME of one in the hub cache") + kWhyConfig);
  }
  std::string looked;
  for (const std::string& cache : environment.hub_caches) {
    const std::string found = hub_snapshot(fs::path(cache) / name, is_model).string();
    if (!found.empty()) return found;
    looked += (looked.empty() ? "" : ", ") + (fs::path(cache) / name).string();
  }
  if (named_by(adapter, path)) throw moved_base(path, adapter);
  const std::string download =
      names_directory(path) ? "give the directory in which the model is now"
                            : "download it first, e.g. `hf download " + path + "`, or give a directory";
  throw refusal("model.path is no directory, and the hub cache holds no complete snapshot of it (looked in " +
                    (looked.empty() ? "nothing: HOME is not set" : looked) + ")",
                path, download + kWhyConfig);
}

}  // namespace lm
