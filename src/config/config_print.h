// The configuration as text: all of it as commented TOML (a run's config.toml, a preset to start from), and
// the differences between two configurations. Pure.
#pragma once

#include <string>
#include <vector>

#include "config/config_visit.h"

namespace lm {

// Lines of a configuration file: tables in the order in which they are first named, comments behind the
// values in one column if these leave room.
class ConfigLines {
 public:
  void table(const std::string& name, const std::string& comment = "");
  // `key`: "train.steps", `value`: as TOML (value_text). A later line of a key replaces the earlier one.
  void set(const std::string& key, const std::string& value, const std::string& comment = "");
  // `column`: with the default most values are on one line with their comment.
  std::string text(size_t column = 34) const;

 private:
  struct Line {
    std::string name, value, comment;
  };
  struct Table {
    std::string name, comment;
    std::vector<Line> lines;
  };
  std::vector<Table> tables_;
};

// Every key that is used, with its value and, as a comment, its help and what it accepts. Reading it back
// gives an equal Config.
std::string print_config(const Config& config);

// One key as text, e.g. {"train", "steps", "100"}; the value as in TOML.
struct KeyText {
  std::string table, name, value;
  KeyTag tag = KeyTag::kNumerics;
};
std::vector<KeyText> list_keys(const Config& config);
// Of a configuration of defaults: every key that there is.
const std::vector<KeyText>& known_keys();

struct KeyDifference {
  std::string key;              // "train.steps"
  std::string recorded, asked;  // values as TOML text
  KeyTag tag = KeyTag::kNumerics;
};

// The keys that change results in which `asked` differs from a run's recorded configuration. "auto" in
// `asked` equals everything: a run keeps the resolved value. [lora] is compared only if adapters are trained,
// and the evaluation only if the schedule follows it.
std::vector<KeyDifference> config_difference(const Config& recorded, const Config& asked);

}  // namespace lm
