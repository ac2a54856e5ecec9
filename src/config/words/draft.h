// The state of a translation while it walks over another trainer's files, and its result (draft.cpp).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "config/words/translate.h"

namespace lm {

// An entry of data.train, as other files describe one.
struct ForeignSource {
  std::string name;                // ORG/NAME, a file, or "json"
  std::vector<std::string> files;  // "": `name` alone
  std::string format;              // for data.format; "": recognised by the columns
  ColumnNames columns = {};
  std::optional<double> weight = {};
};

struct Draft {
  std::string place;  // of the file
  std::string at;     // the key that is being translated
  Project project = Project::kNobody;
  bool done = false;  // it became a setting

  Translated out;
  std::map<std::string, Translated::Setting> settings;
  std::vector<ForeignSource> sources;
  std::vector<std::string> eval;

  // Numbers that several keys determine together.
  std::optional<double> micro, accumulation, processes, beta1, beta2, steps_per_epoch;
  std::optional<std::string> method;                   // as train.method; empty: by the other settings
  std::vector<std::string> targets;                    // of torchtune, beside lora.targets
  std::map<std::string, std::vector<std::string>> of;  // key -> the foreign keys that made it

  void set(const std::string& key, const std::string& value);
  void missing(std::string_view why);
  void unneeded(std::string_view why);
  [[noreturn]] void refuse(std::string_view why) const;
  ForeignSource& source();
};

// Translates one value as its word prescribes.
void carry(const Word& word, const nlohmann::json& value, Draft& draft);
// Makes settings of keys that belong together, and leaves out those that our configuration refuses.
Translated settle(Draft draft, const std::string& model, const std::vector<std::string>& data);

}  // namespace lm
