// Translates another trainer's configuration: every key of the file becomes a setting, or is listed with the
// reason why not. Pure; any thread. word.h has the tables.
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
  std::vector<Setting> settings;  // for parse_config, in the order of list_keys
  std::vector<Left> missing;      // the run differs by these
  std::vector<Left> unneeded;
  std::vector<std::string> off;      // switched off, empty or at the default
  std::vector<std::string> unknown;  // unknown to the project's table
  bool of_one_device = false;        // train.global_batch was computed without the number of devices
};

// The project whose file it is, by its keys.
Project project_of(const nlohmann::json& content);

// `model` and `data` replace those of the files; "" and {}: the files'. Of several files a later one's value
// is used. Throws Error(10) for a file of another task, Error(2) if there is no model or data.
Translated translate(const std::vector<ForeignFile>& files, const std::string& model,
                     const std::vector<std::string>& data);

}  // namespace lm
