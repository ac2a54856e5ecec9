#include "launcher/recorded.h"

#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "config/config_print.h"
#include "config/config_toml.h"

namespace lm {

std::optional<NumericsPlan> recorded_numerics(const std::string& directory, const Config& config,
                                              DeviceType device) {
  const std::string file = directory + "/" + kNumericsFile, settings = directory + "/config.toml";
  if (directory.empty() || access(file.c_str(), F_OK) != 0 || access(settings.c_str(), F_OK) != 0)
    return std::nullopt;
  try {
    if (!config_difference(load_config(settings), config).empty()) return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // the door lets a run start on what it cannot read where nothing is lost
  }
  const NumericsPlan recorded = parse_numerics(read_small_file(file, 1 << 16), file);
  const bool gpu = recorded.kernel_set.starts_with("cuda");
  return gpu == (device == DeviceType::kCuda) ? std::optional(recorded) : std::nullopt;
}

}  // namespace lm
