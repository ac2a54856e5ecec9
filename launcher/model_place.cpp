#include "launcher/model_place.h"

#include <filesystem>
#include <functional>
#include <optional>

#include "base/error.h"
#include "base/hub_snapshot.h"
#include "base/json.h"
#include "base/relative.h"
#include "config/config_text.h"
#include "launcher/recorded.h"
#include "plan/adapter.h"
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

bool is_adapter(const fs::path& directory) {
  return holds(directory, kAdapterConfig) && !is_model(directory);
}

// The first snapshot of that name and revision in a hub cache for which `is_one` holds; "": none.
std::string find_snapshot(const HubName& name, const Environment& environment,
                          const std::function<bool(const fs::path&)>& is_one) {
  for (const std::string& cache : environment.hub_caches) {
    const fs::path found = hub_snapshot(fs::path(cache) / name.folder(), is_one, name.revision);
    if (!found.empty()) return found;
  }
  return "";
}

// Whether every file of weights is there. True for an unreadable index: whoever loads it reports why.
bool has_weights(const fs::path& directory) {
  if (holds(directory, "model.safetensors") || holds(directory, kAdapterWeights)) return true;
  constexpr const char* kIndex = "model.safetensors.index.json";
  if (!holds(directory, kIndex)) return false;
  try {
    const Json index = read_json_file(directory / kIndex);
    for (const Json& file : index.at("weight_map")) {
      if (!holds(directory, file.get<std::string>().c_str())) return false;
    }
  } catch (const std::exception&) {
    return true;
  }
  return true;
}

Error refusal(const std::string& what, const std::string& place, const std::string& next) {
  return Error(Exit::kInput, {.area = "FILE-21", .what = what, .place = place, .next = next});
}

// The base model that an adapter names.
std::string base_of(const std::string& adapter) {
  const AdapterConfig config = read_adapter_config(adapter, nullptr);
  std::error_code ignored;
  std::optional<HubName> named = parse_hub_name(config.base_model);
  if (named && !config.base_revision.empty() && !fs::exists(config.base_model, ignored)) {
    named->revision = config.base_revision;
    return named->text();
  }
  if (!config.base_model.empty()) return config.base_model;
  throw refusal("the adapter does not name its base model", adapter + "/" + kAdapterConfig,
                "set base_model_name_or_path there");
}

// Whether a name of the form ORG/NAME means a directory: its parent exists, though it may be gone itself.
bool names_directory(const std::string& path) {
  std::error_code ignored;
  return !parse_hub_name(path) || fs::is_directory(path.substr(0, path.find('/')), ignored);
}

bool named_by(const std::string& adapter, const std::string& model) {
  return !adapter.empty() && holds_adapter(adapter) &&
         read_adapter_config(adapter, nullptr).base_model == model;
}

// The error for an adapter whose base model is not where the adapter says.
Error moved_base(const std::string& model, const std::string& adapter) {
  std::string next = "set base_model_name_or_path there to where the model is now";
  if (!names_directory(model)) next += ", or fetch it: lmlaunch fetch " + model;
  return refusal("the base model of this adapter was not found: \"" + model + "\"",
                 adapter + "/" + kAdapterConfig, next);
}

constexpr const char* kWhyConfig =
    "; a plan is made from its config.json, which has the model's shape and vocabulary size";

// The error for a directory without a model: what it is, and how to make a model of it.
Error other_directory(const std::string& path) {
  const std::string directory = model_directory(path, {}), exported = "lmlaunch export " + path;
  if (holds_adapter(directory)) {
    const Method method = method_of(read_adapter_config(directory, nullptr).spec.kind);
    const std::string methods = method == Method::kLora ? "\"lora\" or \"qlora\"" : value_text(method);
    return refusal("this is an adapter of \"" + base_of(directory) + "\", not a whole model", path,
                   "set train.method = " + methods +
                       " to train it further, or merge it into its base model: " + exported +
                       " --merge -o DIR");
  }
  if (run_of(path) == path) {
    return refusal("this run has no trained model yet", path,
                   "let it finish: lmlaunch " + path +
                       "/config.toml, or take its newest checkpoint: " + exported + " -o DIR");
  }
  if (holds(path, kManifestName)) {
    return refusal("this is a checkpoint, which only its own run can resume from", path,
                   "make a model of it: " + exported + " -o DIR");
  }
  return refusal("model.path is a directory without a config.json", path,
                 std::string("give a Hugging Face model directory (config.json, *.safetensors, "
                             "tokenizer.json)") +
                     kWhyConfig);
}

// A "~" in a TOML string, or in a shell's `key=~/x`, is not expanded by others.
void settle_home(Config& config, const std::string& home) {
  for (std::string* path : {&config.model.path, &config.lora.init, &config.run.dir,
                            &config.data.chat_template, &config.data.cache_dir})
    *path = with_home(*path, home);
  for (std::string& path : config.offload.paths) path = with_home(path, home);
  for (std::string& path : config.eval.generate.data) path = with_home(path, home);
  if (auto& command = config.eval.generate.command; !command.empty())
    command.front() = with_home(command.front(), home);
  for (std::string& prompt : config.train.sample_prompts) {
    if (prompt.starts_with('@')) prompt = "@" + with_home(prompt.substr(1), home);
  }
}

}  // namespace

std::string model_directory(const std::string& place, const Environment& environment) {
  std::error_code ignored;
  const std::optional<HubName> name = parse_hub_name(place);
  if (name && !fs::exists(place, ignored)) {
    const std::string adapter = find_snapshot(*name, environment, is_adapter);
    return adapter.empty() ? place : adapter;
  }
  const auto whole = [](const fs::path& at) { return is_model(at) || holds_adapter(at.string()); };
  if (whole(place) || run_of(place) != place) return place;
  const fs::path trained = fs::path(place) / "model";
  return whole(trained) ? trained.string() : place;
}

bool holds_adapter(const std::string& directory) {
  return holds(directory, kAdapterConfig);
}

void settle_model(Config& config, const Environment& environment) {
  settle_home(config, environment.home);
  std::string &model = config.model.path, &adapter = config.lora.init;
  if (!adapter.empty()) adapter = model_directory(adapter, environment);
  const std::string meant = model_directory(model, environment);
  if (!holds_adapter(meant)) {
    model = meant;
    return;
  }
  if (!trains_adapter(config)) return;
  std::error_code ignored;
  if (!adapter.empty() && !fs::equivalent(adapter, meant, ignored)) {
    throw setting_error(
        "model.path is an adapter, and lora.init = " + value_text(adapter) + " names another one", model,
        "set model.path = " + value_text(base_of(meant)) + ", and lora.init to the adapter to train further");
  }
  adapter = meant;
  model = base_of(meant);
}

bool model_is_here(const std::string& path, const Environment& environment) {
  std::error_code ignored;
  const std::optional<HubName> name = parse_hub_name(path);
  return fs::exists(path, ignored) || (name && !find_snapshot(*name, environment, [](const fs::path& at) {
                                                  return is_model(at) || is_adapter(at);
                                                }).empty());
}

bool weights_are_here(const std::string& path, const Environment& environment) {
  std::error_code ignored;
  const std::optional<HubName> name = parse_hub_name(path);
  return fs::exists(path, ignored) || (name && !find_snapshot(*name, environment, [](const fs::path& at) {
                                                  return (is_model(at) || is_adapter(at)) && has_weights(at);
                                                }).empty());
}

void require_weights(const std::string& directory) {
  const std::optional<HubName> name = name_of_snapshot(directory);
  if (!name || has_weights(directory)) return;
  throw refusal("the hub cache has this model's config.json, and not all of its weights", directory,
                "fetch the rest: lmlaunch fetch " + name->text());
}

std::string resolve_model(const std::string& path, const Environment& environment,
                          const std::string& adapter) {
  const std::string directory = model_directory(path, environment);
  if (is_model(directory)) return directory;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) throw other_directory(path);
  if (holds_adapter(directory)) throw other_directory(directory);
  const std::optional<HubName> name = parse_hub_name(path);
  if (!name) {
    if (named_by(adapter, path)) throw moved_base(path, adapter);
    throw refusal("model.path does not exist", path,
                  "give a Hugging Face model directory, or ORG/NAME of one in the hub cache" +
                      relative_hint(path) + kWhyConfig);
  }
  const std::string found = find_snapshot(*name, environment, is_model);
  if (!found.empty()) return found;
  std::string looked;
  for (const std::string& cache : environment.hub_caches)
    looked += (looked.empty() ? "" : ", ") + (fs::path(cache) / name->folder()).string();
  if (named_by(adapter, path)) throw moved_base(path, adapter);
  const std::string next = names_directory(path)
                               ? "give the directory in which the model is now"
                               : "fetch it: lmlaunch fetch " + path + ", or give a directory";
  throw refusal("model.path is no directory, and the hub cache holds no complete snapshot of it (looked in " +
                    (looked.empty() ? "nothing: HOME is not set" : looked) + ")",
                path, next + relative_hint(path) + kWhyConfig);
}

}  // namespace lm
