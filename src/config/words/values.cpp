#include "config/words/values.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "config/config_text.h"

namespace lm {

using Json = nlohmann::json;

constexpr double kMostWhole = 1e18;  // fits 64 bits; no key takes as much

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// A list, or names with commas between.
std::vector<std::string> names_of(const Json& value) {
  std::vector<std::string> out;
  if (value.is_array()) {
    for (const Json& one : value) out.push_back(text_of(one));
    return out;
  }
  std::string name;
  for (const char c : text_of(value) + ",") {
    if (c != ',') {
      if (c != ' ' || !name.empty()) name += c;
    } else if (!name.empty()) {
      out.push_back(name);
      name.clear();
    }
  }
  return out;
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

std::string last_of(const std::string& component) {
  return component.substr(component.rfind('.') + 1);
}

bool is_off(const Json& value) {
  if (value.is_null() || value == false) return true;
  if (value.is_structured()) return value.empty();
  if (value.is_number()) return value == 0;
  if (!value.is_string()) return false;
  const std::string text = lower(value.get<std::string>());
  return text.empty() || text == "none" || text == "no" || text == "off" || text == "false" ||
         text == "disabled";
}

std::optional<double> as_number(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  const std::string text = value.get<std::string>();
  double out = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), out);
  const bool whole = end.ec == std::errc() && end.ptr == text.data() + text.size() && !text.empty();
  return whole && std::isfinite(out) ? std::optional(out) : std::nullopt;
}

std::string whole_text(double number) {
  return std::to_string(static_cast<int64_t>(std::clamp(number, -kMostWhole, kMostWhole)));
}

std::string toml_of(const Json& value) {
  if (value.is_boolean()) return value_text(value.get<bool>());
  if (value.is_number_integer()) return value.dump();
  if (value.is_array()) {
    std::string out = "[";
    for (const Json& one : value) out += (out.size() > 1 ? ", " : "") + toml_of(one);
    return out + "]";
  }
  const auto number = as_number(value);
  if (!number) return quote(text_of(value));
  const bool whole = *number == std::floor(*number) && std::abs(*number) < kMostWhole;
  return whole ? whole_text(*number) : number_text(*number);
}

}  // namespace lm
