#include "launcher/presets.h"

#include <sstream>

namespace lm {
namespace {

constexpr std::string_view kMark = "# preset: ";

}  // namespace

const Preset* find_preset(const std::string& name) {
  for (const Preset& preset : presets()) {
    if (preset.name == name || preset.name + ".toml" == name) return &preset;
  }
  return nullptr;
}

std::string preset_mark(const std::string& name) {
  return name.empty() ? "" : std::string(kMark) + name + "\n";
}

std::string preset_of(const std::string& toml) {
  std::istringstream lines(toml);
  for (std::string line; std::getline(lines, line) && line.starts_with('#');) {
    if (line.starts_with(kMark)) return line.substr(kMark.size());
  }
  return "";
}

}  // namespace lm
