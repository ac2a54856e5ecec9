// Fields as TOML text, and what a field accepts in words: "an integer from 1 to 4096, or "auto"". Pure; error
// messages, help and printing use it, so that they cannot disagree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "config/config_visit.h"

namespace lm {

// A checkpoint's directory contains this file, and is named for its step, "step_00000100".
inline constexpr char kManifestName[] = "MANIFEST.json";
std::string checkpoint_name(int64_t step);
// Empty if the text is not such a name.
std::optional<int64_t> checkpoint_step(const std::string& name);

// A TOML basic string, quoted and escaped.
std::string quote(std::string_view text);
// The shortest decimal that reads back to the same value, always with a point or an exponent.
std::string number_text(double value);

inline std::string value_text(int64_t value) {
  return std::to_string(value);
}
inline std::string value_text(bool value) {
  return value ? "true" : "false";
}
inline std::string value_text(double value) {
  return number_text(value);
}
inline std::string value_text(const std::string& value) {
  return quote(value);
}
inline std::string value_text(const ByteSize& value) {
  return quote(exact_bytes(value.bytes));
}
std::string value_text(const Budget& value);
inline std::string value_text(const Duration& value) {
  return quote(seconds_text(value.seconds));
}
inline std::string value_text(const Interval& value) {
  return value.seconds > 0 ? quote(seconds_text(value.seconds)) : std::to_string(value.steps);
}
inline std::string value_text(const ColumnNames& names) {
  std::string out = "{";
  for (const auto& [ours, theirs] : names) out += (out.size() > 1 ? ", " : "") + ours + " = " + quote(theirs);
  return out + "}";
}
template <class T>
std::string value_text(const ModuleValues<T>& values) {
  std::string out = "{";
  for (const auto& [name, value] : values.all)
    out += (out.size() > 1 ? ", " : "") + quote(name) + " = " + value_text(value);
  return out + "}";
}
inline std::string value_text(const TokenName& token) {
  return token.id < 0 ? quote(token.text) : std::to_string(token.id);
}
std::string value_text(const EvalSets& sets);
std::string value_text(const OptimizerGroup& group);
template <class E>
requires std::is_enum_v<E> std::string value_text(E value) {
  return quote(name_of(value));
}
inline std::string value_text(const RecomputeChoice& value) {
  return value.every > 1 ? recompute_name(value) : quote(recompute_name(value));
}
template <class T>
std::string value_text(const std::optional<T>& value) {
  return value ? value_text(*value) : quote("auto");
}
template <class T>
std::string value_text(const std::vector<T>& values) {
  std::string out = "[";
  for (const T& value : values) out += (out.size() > 1 ? ", " : "") + value_text(value);
  return out + "]";
}

// " from 1 to 4096", " greater than 0", " of at least 0 and less than 1", "" when unlimited.
std::string range_text(const Range& range);

inline std::string expected_text(const bool*, const KeyInfo&) {
  return "true or false";
}
inline std::string expected_text(const int64_t*, const KeyInfo& info) {
  return "an integer" + range_text(info.range);
}
inline std::string expected_text(const double*, const KeyInfo& info) {
  return "a number" + range_text(info.range);
}
inline std::string expected_text(const ByteSize*, const KeyInfo& info) {
  return "a size such as \"16MiB\", from " + exact_bytes(static_cast<int64_t>(info.range.low)) + " to " +
         exact_bytes(static_cast<int64_t>(info.range.high));
}
inline std::string expected_text(const Budget*, const KeyInfo&) {
  return "a size such as \"24GiB\" or a share such as \"90%\"";
}
inline std::string expected_text(const Duration*, const KeyInfo&) {
  return "a time such as \"30min\" or \"8h\"";
}
inline std::string expected_text(const Interval*, const KeyInfo&) {
  return "a number of steps or a time such as \"30min\"";
}
inline std::string expected_text(const std::string*, const KeyInfo& info) {
  return info.required ? "a string that is not empty" : "a string";
}
inline std::string expected_text(const std::vector<std::string>*, const KeyInfo& info) {
  return std::string("a list of ") + (info.required ? "one or more " : "") + "strings";
}
inline std::string expected_text(const std::vector<TokenName>*, const KeyInfo&) {
  return "a list of strings and of integers of at least 0";
}
inline std::string expected_text(const std::vector<int64_t>*, const KeyInfo& info) {
  return "a list of integers, each" + range_text(info.range);
}
inline std::string expected_text(const ModuleValues<int64_t>*, const KeyInfo& info) {
  return "a table such as {q_proj = 16, \"layers.0.mlp.up_proj\" = 4}, each an integer" +
         range_text(info.range);
}
inline std::string expected_text(const ModuleValues<double>*, const KeyInfo& info) {
  return "a table such as {q_proj = 16, \"layers.0.mlp.up_proj\" = 4}, each a number" +
         range_text(info.range);
}
inline std::string expected_text(const std::vector<double>*, const KeyInfo& info) {
  const std::string count = info.range.count == 0 ? "" : std::to_string(info.range.count) + " ";
  return "a list of " + count + "numbers, each" + range_text(info.range);
}
inline std::string expected_text(const EvalSets*, const KeyInfo&) {
  return "a list of strings, or a table of such lists, {code = [\"code.jsonl\"]}";
}
inline std::string expected_text(const std::vector<OptimizerGroup>*, const KeyInfo&) {
  return "a list of tables such as {match = \"lm_head\", lr_scale = 0.1, weight_decay = 0.0}, with match and "
         "one or both of the numbers, each at least 0";
}
// " "bf16", "fp32"".
template <class E>
std::string choices_text() {
  std::string out;
  for (const auto& entry : EnumNames<E>::kAll) out += (out.empty() ? " " : ", ") + quote(entry.name);
  return out;
}
template <class E>
requires std::is_enum_v<E> std::string expected_text(const std::vector<E>*, const KeyInfo&) {
  return "a list of" + choices_text<E>();
}
inline std::string expected_text(const ColumnNames*, const KeyInfo&) {
  return "a table such as {prompt = \"question\"}";
}
template <class E>
requires std::is_enum_v<E> std::string expected_text(const E*, const KeyInfo&) {
  return "one of" + choices_text<E>();
}
inline std::string expected_text(const RecomputeChoice*, const KeyInfo& info) {
  return expected_text(static_cast<const Recompute*>(nullptr), info) + ", or an integer" +
         range_text(info.range);
}
template <class T>
std::string expected_text(const std::optional<T>*, const KeyInfo& info) {
  return expected_text(static_cast<const T*>(nullptr), info) + ", or \"auto\"";
}

}  // namespace lm
