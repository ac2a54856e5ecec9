// A configuration of another trainer as one of ours: every key of the file becomes a setting, or is named
// with the reason why it does not. Pure; any thread. The words stand in word.h.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/words/word.h"

namespace lm {

struct ForeignFile {
  std::string place;  // in messages
  nlohmann::json content;
};

struct Translated {
  struct Setting {
    std::string key;    // "optimizer.lr"
    std::string value;  // as TOML
    std::vector<std::string> from;
  };
  struct Left {
    std::string theirs, why;
  };
  std::vector<Project> projects;  // of each file
  std::vector<Setting> settings;  // that parse_config takes together, in the order of list_keys
  std::vector<Left> missing;      // a run differs by these
  std::vector<Left> unneeded;
  std::vector<std::string> off;      // switched off, empty or at the default
  std::vector<std::string> unknown;  // no word of the project
  bool of_one_device = false;        // train.global_batch was made without their number of devices
};

// Whose file it is, by its keys.
Project project_of(const nlohmann::json& content);

// `model` and `data` take the place of what the files name; "" and {}: theirs. Of several files a later one's
// value counts. Throws Error(10): for a file that asks for another task, Error(2) where nothing names a model
// or data.
Translated translate(const std::vector<ForeignFile>& files, const std::string& model,
                     const std::vector<std::string>& data);

}  // namespace lm
