// Configurations to start from: the files of configs/, compiled in, and those that a table makes of a model,
// a method and a card's memory. The door prints and plans them, a run's page is held against the one that its
// configuration was made from.
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
// Null where there is none of this name; "NAME.toml" is NAME.
const Preset* find_preset(const std::string& name);

// "# preset: NAME", a line of a configuration that says what it was made from; "" where that is no preset.
std::string preset_mark(const std::string& name);
// The name in such a line among the comments at the head of a configuration; "": there is none.
std::string preset_of(const std::string& toml);

}  // namespace lm
