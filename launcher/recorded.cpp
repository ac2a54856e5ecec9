#include "launcher/recorded.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "plan/adapter.h"

namespace lm {
namespace {

constexpr std::string_view kAutoMark = "# auto: ";

// Settings that do not fit the model stay as they are: planning the run reports them.
LoraConfig spelt_out(const ModelSpec& model, const Config& config) {
  try {
    return resolved_lora(model, config.lora, configured_adapter(model, config));
  } catch (const Error&) {
    return config.lora;
  }
}

// What lora.init has decided: keys that are not written are as they were recorded.
void take_decided(const LoraConfig& recorded, LoraConfig& asked) {
  const auto open = [&](const char* key) {
    return std::find(asked.written.begin(), asked.written.end(), key) == asked.written.end();
  };
  if (open("r")) asked.r = recorded.r;
  if (open("alpha")) asked.alpha = recorded.alpha;
  if (open("targets")) asked.targets = recorded.targets;
  if (open("layers")) asked.layers = recorded.layers;
  if (open("also")) asked.also = recorded.also;
  if (open("tokens")) asked.tokens = recorded.tokens;
  if (open("ranks")) asked.ranks = recorded.ranks;
  if (open("alphas")) asked.alphas = recorded.alphas;
}

}  // namespace

std::string recorded_date(const std::string& directory) {
  const std::string file = directory + "/" + kDateFile;
  char text[16];
  if (directory.empty() || access(file.c_str(), F_OK) != 0) {
    const std::time_t now = std::time(nullptr);
    std::strftime(text, sizeof text, "%Y-%m-%d", std::localtime(&now));
    return text;
  }
  std::tm day{};
  const std::string written = read_small_file(file, sizeof text - 1);
  const char* end = strptime(written.c_str(), "%Y-%m-%d", &day);
  if (end != written.c_str() + 10 || (*end != '\n' && *end != '\0'))
    throw Error(Exit::kIncompatible, {.area = "RUN-26",
                                      .what = "it holds no date such as 2026-01-31",
                                      .place = file,
                                      .next = "write the day on which the run was begun"});
  return written.substr(0, 10);
}

bool names_configuration(const std::string& what) {
  std::error_code error;
  return what.ends_with(".toml") || std::filesystem::is_regular_file(what, error);
}

std::string auto_mark(const Config& asked, const std::string& asked_text) {
  std::vector<std::string> keys = auto_keys(asked_text);
  for (const KeyText& key : list_keys(asked)) {
    if (key.value == quote("auto")) keys.push_back(key.table + "." + key.name);
  }
  std::ranges::sort(keys);
  keys.erase(std::ranges::unique(keys).begin(), keys.end());
  return keys.empty() ? "" : fmt::format("{}{}\n", kAutoMark, fmt::join(keys, ", "));
}

std::vector<std::string> auto_keys(const std::string& toml) {
  std::vector<std::string> out;
  std::istringstream lines(toml);
  for (std::string line; std::getline(lines, line) && line.starts_with('#');) {
    if (!line.starts_with(kAutoMark)) continue;
    for (size_t begin = kAutoMark.size(); begin < line.size();) {
      const size_t end = std::min(line.find(", ", begin), line.size());
      out.push_back(line.substr(begin, end - begin));
      begin = end + 2;
    }
  }
  return out;
}

std::string run_of(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path run = (fs::absolute(directory, error) / "").lexically_normal().parent_path();
  const bool checkpoint = fs::exists(run / kManifestName, error);
  if (checkpoint) run = run.parent_path().parent_path();
  if (fs::exists(run / "config.toml", error)) return checkpoint ? run.string() : directory;
  const bool model = run.filename() == "model" && fs::is_directory(run, error);
  return model && fs::exists(run.parent_path() / kNumericsFile, error) ? run.parent_path().string() : "";
}

std::string require_run(const std::string& path) {
  const std::string run = run_of(path);
  if (!run.empty()) return run;
  throw Error(Exit::kInput, {.area = "FILE-21",
                             .what = "not a run directory: it has no config.toml",
                             .place = path,
                             .next = "give the run's run.dir, runs/<config's name> unless it was set"});
}

std::vector<KeyDifference> run_differences(const Config& recorded, const Config& asked,
                                           const ModelSpec& model) {
  Config before = recorded, after = asked;
  if (!asked.lora.init.empty()) take_decided(recorded.lora, after.lora);
  for (Config* config : {&before, &after})
    if (trains_adapter(*config)) config->lora = spelt_out(model, *config);
  for (Config* config : {&before, &after})
    if (config->train.method == Method::kPtuning && !config->prompt.hidden)
      config->prompt.hidden = model.hidden;
  std::vector<KeyDifference> out = config_difference(before, after);
  const std::vector<std::string>& written = asked.lora.written;
  std::erase_if(out, [&](const KeyDifference& one) {
    if (one.key == "prompt.length") return !asked.lora.init.empty() && !asked.prompt.length_written;
    const bool adapter =  // decided by the adapter's files
        one.key.starts_with("lora.") && one.key != "lora.init" && one.key != "lora.dtype";
    return adapter && !asked.lora.init.empty() &&
           std::ranges::find(written, one.key.substr(5)) == written.end();
  });
  return out;
}

std::optional<NumericsPlan> recorded_numerics(const std::string& directory, const Config& config,
                                              const ModelSpec& model, DeviceType device) {
  const std::string file = directory + "/" + kNumericsFile, settings = directory + "/config.toml";
  if (directory.empty() || access(file.c_str(), F_OK) != 0 || access(settings.c_str(), F_OK) != 0)
    return std::nullopt;
  try {
    if (!run_differences(load_config(settings), config, model).empty()) return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // an unreadable run does not stop a start that loses nothing
  }
  const NumericsPlan recorded = parse_numerics(read_small_file(file, 1 << 16), file);
  const bool gpu = recorded.kernel_set.starts_with("cuda");
  return gpu == (device == DeviceType::kCuda) ? std::optional(recorded) : std::nullopt;
}

std::string mirror_of(const CheckpointConfig& config, const std::string& run_directory) {
  if (config.mirror.empty()) return "";
  const std::filesystem::path run = std::filesystem::absolute(run_directory).lexically_normal();
  const bool slash = run.filename().empty();
  return config.mirror + "/" + (slash ? run.parent_path() : run).filename().string();
}

}  // namespace lm
