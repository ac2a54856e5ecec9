// Configurations to start from: the files of configs/, compiled in, and those that a table makes from a
// model, a method and a card's memory. The CLI prints and plans them; a run's page compares it with the
// preset that its configuration was made from.
#pragma once

#include <string>
#include <vector>

namespace lm {

struct Preset {
  std::string name;  // without .toml
  std::string text;
};
// Sorted by name.
const std::vector<Preset>& presets();
// Null if there is none of this name; "NAME.toml" means NAME.
const Preset* find_preset(const std::string& name);

// "# preset: NAME", a line that records which preset a configuration was made from; "" if that is no preset.
std::string preset_mark(const std::string& name);
// The name in such a line among the comments at the head of a configuration; "": none.
std::string preset_of(const std::string& toml);

}  // namespace lm
