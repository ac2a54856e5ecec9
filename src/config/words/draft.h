// What a translation collects while it walks over the files of another trainer, and makes of it (draft.cpp).
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
  std::string format;              // of data.format; "": told by the columns
  ColumnNames columns = {};
  std::optional<double> weight = {};
};

struct Draft {
  std::string place;  // of the file
  std::string at;     // the key that is being carried over
  Project project = Project::kNobody;
  bool done = false;  // something was made of it

  Translated out;
  std::map<std::string, Translated::Setting> settings;
  std::vector<ForeignSource> sources;
  std::vector<std::string> eval;

  // Numbers that several words make together.
  std::optional<double> micro, accumulation, processes, beta1, beta2, steps_per_epoch;
  std::optional<std::string> method;  // full, lora or qlora; nothing: as the other settings say
  std::vector<std::string> targets;   // of torchtune, beside lora.targets
  std::map<std::string, std::vector<std::string>> of;  // key -> the words that made it

  void set(const std::string& key, const std::string& value);
  void missing(std::string_view why);
  void unneeded(std::string_view why);
  [[noreturn]] void refuse(std::string_view why) const;
  ForeignSource& source();
};

// Carries one value over as its word says.
void carry(const Word& word, const nlohmann::json& value, Draft& draft);
// Makes settings of what several words said together, and leaves out what our configuration refuses.
Translated settle(Draft draft, const std::string& model, const std::vector<std::string>& data);

}  // namespace lm
