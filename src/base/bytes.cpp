#include "base/bytes.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

namespace lm {

std::optional<int64_t> parse_bytes(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (error != std::errc()) return std::nullopt;
  std::string_view unit(rest, static_cast<size_t>(end - rest));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  constexpr std::pair<std::string_view, double> kUnits[] = {
      {"B", 1},    {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0},   {"KB", 1e3},
      {"MB", 1e6}, {"GB", 1e9},     {"TB", 1e12},       {"TiB", 1099511627776.0}};
  for (const auto& [name, scale] : kUnits) {
    if (unit != name) continue;
    const double bytes = value * scale;
    if (!(bytes >= 0) || bytes >= 9.2e18) return std::nullopt;
    return static_cast<int64_t>(std::llround(bytes));
  }
  return std::nullopt;
}

std::string with_unit(std::string_view text, std::string_view unit) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (error != std::errc() || rest != end || !(value > 0) || value >= 9.2e18) return "";
  if (value < static_cast<double>(kMiB)) return std::string(text).append(unit);
  return exact_bytes(std::llround(value));
}

std::string exact_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < std::size(kUnits)) bytes /= 1024, ++unit;
  return std::to_string(bytes) + kUnits[unit];
}

std::string format_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < std::size(kUnits)) value /= 1024.0, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 || value >= 100 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

}  // namespace lm
