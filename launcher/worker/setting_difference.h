// What two runs' directories record about how they compute, compared: the settings of config.toml, and what
// is recorded beside it (numerics.json, the base model's revision, the chat template's date). Only reads.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace lm {

// Values as they are in the files; "" for one that a run has not recorded.
struct ValueDifference {
  std::string key;
  std::array<std::string, 2> values;
};

struct SettingDifference {
  std::vector<ValueDifference> settings;        // keys that can change results
  std::vector<ValueDifference> without_effect;  // other keys: paths, placement, reports
  std::vector<ValueDifference> recorded;        // "numerics.threads", "base_model.revision", "date"
};

// Directories of runs. Throws Error(10, 11) for a file that cannot be read.
SettingDifference compare_settings(const std::string& a, const std::string& b);

}  // namespace lm
