#include <algorithm>
#include <cstdio>

#include "config/config_reference.h"
#include "config/config_toml.h"
#include "config/nearest.h"
#include "launcher/cli/commands.h"

namespace lm {
namespace {

std::string joined(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : "\n") + text;
  return out;
}

// What `word` names: a command, a table and keys, in this order; several may have the same name.
std::vector<std::string> texts_of(const std::string& word, const std::vector<TableDoc>& tables) {
  std::vector<std::string> out;
  if (std::ranges::count(command_names(), word) > 0) out.push_back(help_text(word));
  for (const TableDoc& table : tables) {
    if (table.name == word || "[" + table.name + "]" == word) out.push_back(table_text(table));
  }
  for (const TableDoc& table : tables) {
    for (const KeyDoc& key : table.keys) {
      if (key.name == word || key.full() == word) out.push_back(key_text(key));
    }
  }
  return out;
}

// "; did you mean `optimizer.lr`?": the answer to a configuration with this key, so that help knows other
// trainers' names. "" if there is none.
std::string answer_to_key(const std::string& word) {
  const std::string key = word.find('.') == std::string::npos ? "train." + word : word;
  try {
    parse_config("[model]\npath = \"m\"\n[data]\ntrain = [\"d\"]\n", "", {key + "=1"});
  } catch (const Error& error) {
    const std::string what = error.text().what;
    const size_t answer = what.find("; ");
    if (answer != std::string::npos) return what.substr(answer);
  }
  return "";
}

std::string suggestion(const std::string& word, const std::vector<TableDoc>& tables) {
  std::vector<std::string> names = command_names();
  for (const TableDoc& table : tables) names.push_back(table.name);
  const auto hit = nearest(word, names);
  // A misspelling changes at most a quarter of the letters: "wd" is no mistyped "io".
  const bool slip = hit && edit_distance(word, *hit) * 4 <= static_cast<int>(word.size());
  return slip ? "; did you mean `" + *hit + "`?" : answer_to_key(word);
}

std::string text_of_word(const std::string& word) {
  const std::vector<TableDoc> tables = config_reference();
  const std::vector<std::string> found = texts_of(word, tables);
  if (!found.empty()) return joined(found);
  throw usage_error("no command, table or key is called `" + word + "`" + suggestion(word, tables),
                    "`lmlaunch --help` lists the commands, `lmlaunch help --markdown` every key");
}

}  // namespace

Exit help_command(const CommandLine& line) {
  std::string text;
  if (line.has("--markdown")) {
    text = reference_page();
  } else if (line.positional.empty()) {
    text = help_text("");
  } else if (line.has("--help")) {  // `lmlaunch plan --help`: of the command alone
    text = help_text(line.positional[0]);
  } else {
    text = text_of_word(line.positional[0]);
  }
  std::fputs(text.c_str(), stdout);
  return Exit::kDone;
}

}  // namespace lm
