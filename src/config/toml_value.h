// Reads a TOML value into a field of a Config: one `read` per type, which is false for another type or a
// value outside its range, and the suggestion of what was probably meant. Pure.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "config/config_text.h"
#include "config/nearest.h"
#include "config/toml_text.h"

namespace lm {

// A value that was given for a key, and where.
struct Entry {
  const toml::node* node = nullptr;
  Problem where;    // text unused
  std::string raw;  // command line: the text after '='
  bool command_line = false;
};

// Where a node begins in its file.
inline Problem at(const toml::source_region& source, const std::string& file) {
  return {file, static_cast<int>(source.begin.line), static_cast<int>(source.begin.column), ""};
}

inline std::string shorten(std::string text) {
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// "a string "abc"", "1.5", "a list": the value in a message about the expected type.
inline std::string got_text(const toml::node& node) {
  if (const auto* text = node.as_string()) return "the string " + quote(shorten(text->get()));
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* number = node.as_floating_point()) return number_text(number->get());
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  if (node.is_array()) return "a list";
  if (node.is_table()) return "a table";
  return "a date or time";
}

inline bool in_range(double value, const Range& range) {
  if (!std::isfinite(value)) return false;
  if (range.low_open ? value <= range.low : value < range.low) return false;
  return range.high_open ? value < range.high : value <= range.high;
}

inline bool printable(const std::string& text) {
  return std::none_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

// read(entry, field, info): true if the value has the type and is in the range.
inline bool read(const Entry& entry, bool& field, const KeyInfo&) {
  const auto* flag = entry.node->as_boolean();
  if (flag) field = flag->get();
  return flag != nullptr;
}
inline bool read(const Entry& entry, int64_t& field, const KeyInfo& info) {
  const auto* number = entry.node->as_integer();
  if (!number || !in_range(static_cast<double>(number->get()), info.range)) return false;
  field = number->get();
  return true;
}
inline bool read(const Entry& entry, double& field, const KeyInfo& info) {
  const auto number = entry.node->is_number() ? entry.node->value<double>() : std::nullopt;
  if (!number || !in_range(*number, info.range)) return false;
  field = *number;
  return true;
}
// A bare word of the command line that TOML takes for a date or a number is a string if a string is expected.
inline std::optional<std::string> word(const Entry& entry) {
  if (const auto* text = entry.node->as_string()) return text->get();
  if (entry.command_line && !entry.node->is_array() && !entry.node->is_table()) return entry.raw;
  return std::nullopt;
}
inline bool read(const Entry& entry, std::string& field, const KeyInfo& info) {
  const std::optional<std::string> text = word(entry);
  if (!text || !printable(*text) || (info.required && text->empty())) return false;
  field = *text;
  return true;
}
// Sizes are strings with a unit, so that nobody has to count zeros or takes 24 for GiB.
inline std::optional<int64_t> size_of(const Entry& entry) {
  const std::optional<std::string> text = word(entry);
  return text ? parse_bytes(*text) : std::nullopt;
}
inline bool read(const Entry& entry, ByteSize& field, const KeyInfo& info) {
  const std::optional<int64_t> bytes = size_of(entry);
  if (!bytes || !in_range(static_cast<double>(*bytes), info.range)) return false;
  field.bytes = *bytes;
  return true;
}
inline bool read(const Entry& entry, Budget& field, const KeyInfo&) {
  const std::optional<std::string> text = word(entry);
  if (text && text->ends_with('%')) {
    double percent = 0;
    const char* const end = text->data() + text->size() - 1;
    const auto parsed = std::from_chars(text->data(), end, percent);
    if (parsed.ec != std::errc() || parsed.ptr != end || !(percent >= 1e-6 && percent <= 100)) return false;
    field = {0, percent / 100};
    return true;
  }
  const std::optional<int64_t> bytes = size_of(entry);
  if (!bytes || *bytes == 0) return false;
  field = {*bytes, 0};
  return true;
}
inline bool read(const Entry& entry, Duration& field, const KeyInfo&) {
  const std::optional<std::string> text = word(entry);
  const std::optional<int64_t> seconds = text ? parse_seconds(*text) : std::nullopt;
  if (!seconds || *seconds == 0) return false;
  field.seconds = *seconds;
  return true;
}
inline bool read(const Entry& entry, Interval& field, const KeyInfo& info) {
  Interval read_as;
  Duration time;
  if (!read(entry, read_as.steps, info) && !read(entry, time, info)) return false;
  read_as.seconds = time.seconds;
  field = read_as;
  return true;
}
// Unknown column names are reported together (config_check.cpp).
inline bool read(const Entry& entry, ColumnNames& field, const KeyInfo& info) {
  const auto* table = entry.node->as_table();
  if (table == nullptr) return false;
  ColumnNames names;
  KeyInfo each = info;
  each.required = true;
  for (auto&& [name, value] : *table) {
    if (!read(Entry{&value, entry.where, "", false}, names[std::string(name.str())], each)) return false;
  }
  field = std::move(names);
  return true;
}
template <class E>
requires std::is_enum_v<E>
bool read(const Entry& entry, E& field, const KeyInfo&) {
  const std::optional<std::string> text = word(entry);
  const std::optional<E> value = text ? parse_name<E>(*text) : std::nullopt;
  if (value) field = *value;
  return value.has_value();
}
inline bool read(const Entry& entry, RecomputeChoice& field, const KeyInfo& info) {
  Recompute level = Recompute::kBlock;
  int64_t every = 1;
  if (!read(entry, every, info) && !read(entry, level, info)) return false;
  field = {level, every};
  return true;
}
template <class T>
bool read(const Entry& entry, std::optional<T>& field, const KeyInfo& info) {
  const auto* text = entry.node->as_string();
  T value{};
  if (text && text->get() == "auto") {
    field.reset();
  } else if (read(entry, value, info)) {
    field = value;
  } else {
    return false;
  }
  return true;
}
// A regular expression that is none is reported with its reason (config_check.cpp).
inline bool read(const Entry& entry, OptimizerGroup& field, const KeyInfo&) {
  const auto* table = entry.node->as_table();
  if (table == nullptr) return false;
  OptimizerGroup group;
  KeyInfo text{KeyTag::kNumerics, "", {}, true}, number{KeyTag::kNumerics, "", {.low = 0, .high = 1e6}};
  for (auto&& [key, value] : *table) {
    const Entry one{&value, entry.where, "", false};
    double decay = 0;
    if (key.str() == "match") {
      if (!read(one, group.match, text)) return false;
    } else if (key.str() == "lr_scale") {
      if (!read(one, group.lr_scale, number)) return false;
    } else if (key.str() == "weight_decay" && read(one, decay, number)) {
      group.weight_decay = decay;
    } else {
      return false;
    }
  }
  field = std::move(group);
  return !field.match.empty();
}
inline bool read(const Entry& entry, TokenName& field, const KeyInfo& info) {
  KeyInfo number = info;
  number.range = {.low = 0, .high = 1e9};
  if (read(entry, field.id, number)) return true;
  return entry.node->is_string() && read(entry, field.text, info);
}
template <class T>
bool read(const Entry& entry, std::vector<T>& field, const KeyInfo& info) {
  std::vector<T> values;
  KeyInfo each = info;
  each.required = true;  // an empty string is no name
  if (const auto* list = entry.node->as_array()) {
    for (const toml::node& node : *list) {
      values.emplace_back();
      if (!read(Entry{&node, entry.where, "", false}, values.back(), each)) return false;
    }
  } else if (std::is_same_v<T, std::string> || std::is_enum_v<T>) {  // a single value is a list of one
    values.emplace_back();
    if (!read(entry, values.back(), each)) return false;
  } else {
    return false;
  }
  if (info.range.count != 0 && values.size() != static_cast<size_t>(info.range.count)) return false;
  if (info.required && values.empty()) return false;
  field = std::move(values);
  return true;
}

// The keys of a table in the file's order: toml++ sorts them by name.
inline std::vector<const toml::key*> keys_in_order(const toml::table& table) {
  std::vector<const toml::key*> names;
  for (auto&& [name, value] : table) names.push_back(&name);
  std::ranges::sort(
      names, [](const toml::key* a, const toml::key* b) { return a->source().begin < b->source().begin; });
  return names;
}

// A regular expression that is none is reported with its reason (config_check.cpp).
template <class T>
bool read(const Entry& entry, ModuleValues<T>& field, const KeyInfo& info) {
  const auto* table = entry.node->as_table();
  if (table == nullptr) return false;
  ModuleValues<T> values;
  for (const toml::key* name : keys_in_order(*table)) {
    values.all.emplace_back(std::string(name->str()), T{});
    const Entry value{table->get(name->str()), entry.where, "", false};
    if (name->empty() || !read(value, values.all.back().second, info)) return false;
  }
  field = std::move(values);
  return true;
}

inline bool read(const Entry& entry, EvalSets& field, const KeyInfo& info) {
  EvalSets sets;
  const auto* table = entry.node->as_table();
  if (table == nullptr) {
    std::vector<std::string> files;
    if (!read(entry, files, info)) return false;
    if (!files.empty()) sets.all.push_back({"", std::move(files)});
    field = std::move(sets);
    return true;
  }
  KeyInfo each = info;
  each.required = true;
  for (const toml::key* name : keys_in_order(*table)) {
    sets.all.push_back({std::string(name->str()), {}});
    const Entry value{table->get(name->str()), entry.where, "", false};
    if (name->empty() || !read(value, sets.all.back().files, each)) return false;
  }
  field = std::move(sets);
  return true;
}

// Suggests the nearest value of a choice.
template <class T>
std::string word_hint(const Entry&, const T*) {
  return "";
}
template <class E>
requires std::is_enum_v<E> std::string word_hint(const Entry& entry, const E*) {
  std::vector<std::string> names;
  for (const auto& known : EnumNames<E>::kAll) names.emplace_back(known.name);
  if constexpr (requires { EnumNames<E>::kOtherNames; }) {
    for (const auto& known : EnumNames<E>::kOtherNames) names.emplace_back(known.name);
  }
  const auto text = word(entry);
  if constexpr (requires { EnumNames<E>::kRefused; }) {
    for (const auto& [part, why] : EnumNames<E>::kRefused)
      if (text && text->find(part) != std::string::npos) return std::string("; ") + why;
  }
  const auto hit = text ? nearest(*text, names) : std::nullopt;
  return hit ? "; did you mean " + quote(*hit) + "?" : "";
}

inline std::string word_hint(const Entry& entry, const RecomputeChoice*) {
  return word_hint(entry, static_cast<const Recompute*>(nullptr));
}

template <class E>
requires std::is_enum_v<E> std::string word_hint(const Entry& entry, const std::vector<E>*) {
  const auto* list = entry.node->as_array();
  if (list == nullptr) return word_hint(entry, static_cast<const E*>(nullptr));
  for (const toml::node& node : *list) {
    const Entry one{&node, entry.where, "", false};
    E known{};
    if (!read(one, known, KeyInfo{})) return word_hint(one, static_cast<const E*>(nullptr));
  }
  return "";
}

// Suggests a unit for a size without one. `unit`: the usual unit of small sizes of this type.
inline std::string size_hint(const Entry& entry, const char* unit) {
  std::string number;
  if (const auto text = entry.node->value<std::string>()) number = *text;
  if (entry.node->is_number()) number = got_text(*entry.node);
  const std::string meant = with_unit(number, unit);
  return meant.empty() ? "" : " without a unit; did you mean " + quote(meant) + "?";
}
inline std::string word_hint(const Entry& entry, const Budget*) {
  return size_hint(entry, "GiB");
}
inline std::string word_hint(const Entry& entry, const ByteSize*) {
  return size_hint(entry, "MiB");
}
template <class T>
std::string word_hint(const Entry& entry, const std::optional<T>*) {
  return word_hint(entry, static_cast<const T*>(nullptr));
}

}  // namespace lm
