#include "config/config_text.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace lm {
namespace {

// 1000000 rather than 1e+06.
std::string bound_text(double bound) {
  const bool whole = bound == std::floor(bound) && std::abs(bound) < kMostCounted;
  return whole ? std::to_string(static_cast<int64_t>(bound)) : number_text(bound);
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%08ld", step);
  return name;
}

std::optional<int64_t> checkpoint_step(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  int64_t step = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  return step > 0 && checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20 || c == 0x7f) {
      char hex[8];
      std::snprintf(hex, sizeof hex, "\\u%04x", c);
      out += hex;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  std::string text(buffer, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string value_text(const Budget& value) {
  if (value.share <= 0) return quote(exact_bytes(value.bytes));
  char text[32];
  std::snprintf(text, sizeof text, "%.6g%%", 100 * value.share);
  return quote(text);
}

std::string value_text(const EvalSets& sets) {
  if (sets.empty()) return "[]";
  if (sets.all.front().name.empty()) return value_text(sets.all.front().files);
  std::string out;
  for (const EvalSet& set : sets.all)
    out += (out.empty() ? "{" : ", ") + set.name + " = " + value_text(set.files);
  return out + "}";
}

std::string value_text(const OptimizerGroup& group) {
  std::string out = "{match = " + quote(group.match) + ", lr_scale = " + number_text(group.lr_scale);
  if (group.weight_decay) out += ", weight_decay = " + number_text(*group.weight_decay);
  return out + "}";
}

std::string range_text(const Range& range) {
  const bool low = std::isfinite(range.low), high = std::isfinite(range.high) && range.high != kMostCounted;
  if (!low && !high) return "";
  const std::string from = low ? bound_text(range.low) : "", to = high ? bound_text(range.high) : "";
  if (low && high && !range.low_open && !range.high_open) return " from " + from + " to " + to;
  const std::string above = (range.low_open ? " greater than " : " of at least ") + from;
  const std::string below = (range.high_open ? " less than " : " at most ") + to;
  return (low ? above : "") + (low && high ? " and" : "") + (high ? below : "");
}

}  // namespace lm
