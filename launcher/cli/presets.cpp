#include <cstdio>
#include <nlohmann/json.hpp>

#include "config/nearest.h"
#include "launcher/cli/commands.h"

namespace lm {
namespace {

// A preset's first comment says what it is for.
std::string first_comment(const std::string& text) {
  if (!text.starts_with('#')) return "";
  const std::string line = text.substr(1, text.find('\n') - 1);
  return line.substr(std::min(line.find_first_not_of(" #"), line.size()));
}

}  // namespace

Exit presets_command(const CommandLine& line) {
  if (line.positional.empty()) {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    size_t width = 0;
    for (const Preset& preset : presets()) width = std::max(width, preset.name.size());
    for (const Preset& preset : presets()) {
      json.push_back({{"name", preset.name}, {"about", first_comment(preset.text)}});
      if (!line.has("--json")) {
        std::printf("%-*s  %s\n", static_cast<int>(width), preset.name.c_str(),
                    first_comment(preset.text).c_str());
      }
    }
    if (line.has("--json")) std::printf("%s\n", nlohmann::ordered_json{{"presets", json}}.dump().c_str());
    return Exit::kDone;
  }
  const std::string& name = line.positional[0];
  if (const Preset* const preset = find_preset(name)) {
    const std::string text = preset_mark(preset->name) + preset->text;
    if (line.has("--json")) {
      std::printf("%s\n", nlohmann::ordered_json{{"name", preset->name}, {"toml", text}}.dump().c_str());
    } else {
      std::fputs(text.c_str(), stdout);
    }
    return Exit::kDone;
  }
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  const auto hit = nearest(name, names);
  throw usage_error("unknown preset `" + name + "`" + (hit ? "; did you mean `" + *hit + "`?" : ""),
                    "`lmlaunch presets` lists them");
}

}  // namespace lm
