#include "launcher/recorded.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "spec/parameter.h"

namespace lm {

namespace {

// The model is not read yet, so only Llama's names are known; others stay as they are.
std::vector<std::string> spelt_out(const std::vector<std::string>& targets) {
  try {
    return resolve_targets(llama_names(), targets, "lora.targets");
  } catch (const Error&) {
    return targets;
  }
}

}  // namespace

std::string run_of(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path run = (fs::absolute(directory, error) / "").lexically_normal().parent_path();
  const bool checkpoint = fs::exists(run / kManifestName, error);
  if (checkpoint) run = run.parent_path().parent_path();
  return fs::exists(run / "config.toml", error) ? (checkpoint ? run.string() : directory) : "";
}

std::vector<KeyDifference> run_differences(const Config& recorded, const Config& asked) {
  Config before = recorded, after = asked;
  for (Config* config : {&before, &after}) config->lora.targets = spelt_out(config->lora.targets);
  std::vector<KeyDifference> out = config_difference(before, after);
  const std::vector<std::string>& written = asked.lora.written;
  std::erase_if(out, [&](const KeyDifference& one) {
    const bool adapter = one.key.starts_with("lora.") && one.key != "lora.init";
    return adapter && !asked.lora.init.empty() &&
           std::ranges::find(written, one.key.substr(5)) == written.end();
  });
  return out;
}

std::optional<NumericsPlan> recorded_numerics(const std::string& directory, const Config& config,
                                              DeviceType device) {
  const std::string file = directory + "/" + kNumericsFile, settings = directory + "/config.toml";
  if (directory.empty() || access(file.c_str(), F_OK) != 0 || access(settings.c_str(), F_OK) != 0)
    return std::nullopt;
  try {
    if (!run_differences(load_config(settings), config).empty()) return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // the door lets a run start on what it cannot read where nothing is lost
  }
  const NumericsPlan recorded = parse_numerics(read_small_file(file, 1 << 16), file);
  const bool gpu = recorded.kernel_set.starts_with("cuda");
  return gpu == (device == DeviceType::kCuda) ? std::optional(recorded) : std::nullopt;
}

}  // namespace lm
