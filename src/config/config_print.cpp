#include "config/config_print.h"

#include <algorithm>

#include "config/config_text.h"

namespace lm {
namespace {

struct Printer {
  ConfigLines out;
  void table(const char* name, const char* help) { out.table(name, help); }
  template <class T>
  void key(const char* table, const char* name, const T& field, const KeyInfo& info) {
    if (!info.used) return;
    out.set(std::string(table) + "." + name, value_text(field),
            std::string(info.help) + " (" + expected_text(static_cast<const T*>(nullptr), info) + ")");
  }
};

struct Lister {
  std::vector<KeyText> keys;
  void table(const char*, const char*) {}
  template <class T>
  void key(const char* table, const char* name, const T& field, const KeyInfo& info) {
    keys.push_back({table, name, value_text(field), info.tag});
  }
};

bool matters(const KeyText& key, const Config& config) {
  if (key.table == "lora" && !trains_adapter(config)) return false;
  if (key.table == "prompt" && !has_virtual_tokens(config.train.method)) return false;
  if (key.name == "double_quantize" && !quantizes_to_four_bits(config.model)) return false;
  const bool evaluation = (key.table == "data" && key.name == "eval") || key.name == "eval_every";
  if (evaluation && config.optimizer.schedule == LrSchedule::kReduceLrOnPlateau) return true;
  return changes_results(key.tag);
}

}  // namespace

void ConfigLines::table(const std::string& name, const std::string& comment) {
  tables_.push_back({name, comment, {}});
}

void ConfigLines::set(const std::string& key, const std::string& value, const std::string& comment) {
  const size_t dot = key.rfind('.');  // [eval.generate] has one in its name
  const std::string table_name = key.substr(0, dot), name = key.substr(dot + 1);
  auto found = std::ranges::find(tables_, table_name, &Table::name);
  if (found == tables_.end()) found = tables_.insert(found, {table_name, "", {}});
  const auto earlier = std::ranges::find(found->lines, name, &Line::name);
  (earlier == found->lines.end() ? found->lines.emplace_back() : *earlier) = {name, value, comment};
}

std::string ConfigLines::text(size_t column) const {
  std::string out;
  const auto add = [&](std::string line, size_t width, const std::string& comment) {
    if (!comment.empty()) line.resize(std::max(line.size() + 2, width), ' ');
    out += line + (comment.empty() ? "" : "# " + comment) + "\n";
  };
  for (const Table& table : tables_) {
    add((out.empty() ? "[" : "\n[") + table.name + "]", 0, table.comment);
    for (const Line& line : table.lines) add(line.name + " = " + line.value, column, line.comment);
  }
  return out;
}

std::string print_config(const Config& config) {
  Printer printer;
  visit_config(config, printer);
  return printer.out.text();
}

std::vector<KeyText> list_keys(const Config& config) {
  Lister lister;
  visit_config(config, lister);
  return std::move(lister.keys);
}

const std::vector<KeyText>& known_keys() {
  static const std::vector<KeyText> keys = list_keys(Config{});
  return keys;
}

std::vector<KeyDifference> config_difference(const Config& recorded, const Config& asked) {
  const auto keys = [](Config config) {
    config.lora.dtype = adapter_type(config);
    // The tokens are the same.
    if (config.data.render == Render::kAuto) config.data.render = Render::kPlain;
    return list_keys(config);
  };
  const std::vector<KeyText> before = keys(recorded), after = keys(asked);
  std::vector<KeyDifference> out;
  for (size_t i = 0; i < after.size(); ++i) {
    const bool resolved_once = after[i].value == quote("auto");
    if (before[i].value == after[i].value || resolved_once || !matters(after[i], asked)) continue;
    out.push_back({after[i].table + "." + after[i].name, before[i].value, after[i].value, after[i].tag});
  }
  return out;
}

}  // namespace lm
