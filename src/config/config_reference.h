// The reference of all configuration keys: what each accepts, its default, and whether a resumed run may
// change it. `lmlaunch help` prints it, and docs/configuration.md is made from it. Pure.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/config_visit.h"

namespace lm {

struct KeyDoc {
  std::string table, name;
  std::string accepts;  // "an integer from 1 to 4096"
  std::string value;    // the default, as TOML
  std::string help;
  KeyTag tag = KeyTag::kNumerics;
  std::string rules;                                         // the optimizers that have it; "": all
  std::vector<std::pair<std::string, std::string>> choices;  // values with their own explanation
  std::string full() const { return table + "." + name; }
};

struct TableDoc {
  std::string name, help;
  std::vector<KeyDoc> keys;
};

// In the order of config_visit.h. A key that several optimizers share is listed once if it has the same
// meaning.
std::vector<TableDoc> config_reference();

// Text for a terminal: one key in full, or one table with a line per key.
std::string key_text(const KeyDoc& key);
std::string table_text(const TableDoc& table);

// docs/configuration.md.
std::string reference_page();

}  // namespace lm
