// The configuration as text: the whole of it as commented TOML (a run's config.toml, a preset to start from),
// and what differs between two of them. Pure.
#pragma once

#include <string>
#include <vector>

#include "config/config_visit.h"

namespace lm {

// The lines of a configuration file, for people: tables in the order in which they are first named, comments
// behind the values in one column where these leave room.
class ConfigLines {
 public:
  void table(const std::string& name, const std::string& comment = "");
  // `key`: "train.steps", `value`: as TOML (value_text). A later line of a key takes the place of the earlier
  // one.
  void set(const std::string& key, const std::string& value, const std::string& comment = "");
  // `column`: the default leaves most values on one line with their comment.
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

// Every key that counts with its value, each with its help and what it accepts as a comment. Reading it back
// gives an equal Config.
std::string print_config(const Config& config);

// One key as text, e.g. {"train", "steps", "100"}; the value as in TOML.
struct KeyText {
  std::string table, name, value;
  KeyTag tag = KeyTag::kNumerics;
};
std::vector<KeyText> list_keys(const Config& config);

struct KeyDifference {
  std::string key;              // "train.steps"
  std::string recorded, asked;  // values as TOML text
  KeyTag tag = KeyTag::kNumerics;
};

// The keys that change results in which `asked` differs from what a run recorded. "auto" in `asked` differs
// from nothing: a run keeps what auto was resolved to. [lora] counts only where adapters are trained, and the
// evaluation only where the schedule follows it.
std::vector<KeyDifference> config_difference(const Config& recorded, const Config& asked);

}  // namespace lm
