#include "launcher/presets.h"

#include <algorithm>
#include <sstream>

#include "launcher/preset_table.h"

namespace lm {
namespace {

constexpr std::string_view kMark = "# preset: ";

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> kAll = [] {
    std::vector<Preset> out = preset_files();
    for (Preset& preset : preset_table()) out.push_back(std::move(preset));
    std::ranges::sort(out, {}, &Preset::name);
    return out;
  }();
  return kAll;
}

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
