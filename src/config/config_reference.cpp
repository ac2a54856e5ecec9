#include "config/config_reference.h"

#include <algorithm>
#include <type_traits>

#include "config/config_text.h"

namespace lm {
namespace {

struct Collector {
  std::vector<TableDoc> tables;
  void table(const char* name, const char* help) { tables.push_back({name, help, {}}); }
  template <class T>
  void key(const char* table, const char* name, const T& field, const KeyInfo& info) {
    const std::string rule = info.rule == nullptr ? "" : info.rule;
    const std::string value = value_text(field);
    KeyDoc doc{table,
               name,
               expected_text(static_cast<const T*>(nullptr), info),
               info.required && value.size() <= 2 ? "must be set" : value,
               info.help,
               info.tag,
               rule,
               {}};
    if constexpr (std::is_same_v<T, RuleId>) {
      doc.help = "optimizer";
      for (const RuleText& text : Rules::kTexts) doc.choices.emplace_back(text.name, text.help);
    }
    add(std::move(doc));
  }

 private:
  void add(KeyDoc doc) {
    std::vector<KeyDoc>& keys = tables.back().keys;
    const auto same = std::ranges::find_if(keys, [&](const KeyDoc& key) {
      return !doc.rules.empty() && key.name == doc.name && key.accepts == doc.accepts &&
             key.value == doc.value && key.help == doc.help;
    });
    if (same == keys.end()) {
      keys.push_back(std::move(doc));
    } else {
      same->rules += ", " + doc.rules;
    }
  }
};

// For a table's cell: a bar would end it.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) out += (c == '|' ? "\\|" : c == '<' ? "&lt;" : std::string(1, c));
  return out;
}

const char* at_resume(const KeyDoc& key) {
  if (key.tag == KeyTag::kNumerics) return "refused unless `--override`";
  if (changes_results(key.tag)) return "refused";
  if (key.tag == KeyTag::kPlacement) return "allowed: same result";
  const bool evaluation = key.full() == "data.eval" || key.full() == "train.eval_every";
  return evaluation ? "allowed, except with the schedule `reduce_lr_on_plateau`" : "allowed";
}

std::string without_ticks(std::string text) {
  std::erase(text, '`');
  return text;
}

constexpr char kPageHead[] =
    R"(# Configuration

Every key of a configuration file. `lmlaunch help KEY` and `lmlaunch help TABLE` print the same. This page is written by
`lmlaunch help --markdown`, and a test compares the two.

A configuration is a TOML file. Each key can also be set on the command line as `table.key=value`; the command line wins.

- `"auto"` lets the plan decide. `lmlaunch plan` prints the decision and its reason, and the run's `config.toml` records it: a
  resumed run keeps it.
- Sizes are written as `"24GiB"` or as a share such as `"90%"`, times as `"30min"`.
- The last column says what happens if a resumed run has another value. "Refused unless `--override`": the result would change, so
  the run stops unless you pass `--override KEY`. "Refused": the saved state or the tokens depend on it, so start a new run. Keys of
  `[lora]` count only if adapters are trained.
)";

}  // namespace

std::vector<TableDoc> config_reference() {
  Collector collector;
  const Config defaults;
  visit_config(defaults, collector);
  return std::move(collector.tables);
}

std::string key_text(const KeyDoc& key) {
  std::string out =
      key.full() + (key.rules.empty() ? "" : "  (" + key.rules + ")") + "\n  " + key.help + "\n";
  for (const auto& [choice, help] : key.choices) {
    std::string name = "    " + choice;
    name.resize(std::max<size_t>(name.size() + 2, 24), ' ');
    out += name + help + "\n";
  }
  out += "  accepts    " + key.accepts + "\n";
  out += "  default    " + key.value + "\n";
  out += "  at resume  " + without_ticks(at_resume(key)) +
         (key.tag == KeyTag::kNumerics ? " " + key.full() : "");
  return out + "\n";
}

std::string table_text(const TableDoc& table) {
  std::string out = "[" + table.name + "]  " + table.help + "\n\n";
  for (const KeyDoc& key : table.keys) {
    std::string line = "  " + key.name + " = " + key.value;
    line.resize(std::max<size_t>(line.size() + 2, 36), ' ');
    out += line + key.help + (key.rules.empty() ? "" : " (" + key.rules + ")") + "\n";
  }
  return out + "\n`lmlaunch help " + table.name +
         ".KEY` says what a key accepts, and whether a resumed run may change it.\n";
}

std::string reference_page() {
  std::string out = kPageHead;
  for (const TableDoc& table : config_reference()) {
    out += "\n## " + table.name + "\n\n`[" + table.name + "]`: " + table.help + ".\n\n";
    out += "| key | what it does | accepts | default | changed at resume |\n|---|---|---|---|---|\n";
    std::string choices;
    for (const KeyDoc& key : table.keys) {
      const std::string rules = key.rules.empty() ? "" : " (" + key.rules + ")";
      const std::string value = key.value == "must be set" ? key.value : "`" + key.value + "`";
      out += "| `" + key.full() + "` | " + cell(key.help) + rules + " | " + cell(key.accepts) + " | " +
             value + " | " + at_resume(key) + " |\n";
      if (key.choices.empty()) continue;
      choices += "\n`" + key.full() + "`:\n\n";
      for (const auto& [choice, help] : key.choices) choices += "- `" + choice + "`: " + help + "\n";
    }
    out += choices;
  }
  return out;
}

}  // namespace lm
