#include "base/clock.h"

#include <fmt/format.h>
#include <charconv>

namespace lm {
namespace {

struct Unit {
  std::string_view name;
  int64_t seconds;
};
constexpr Unit kUnits[] = {{"d", 86400}, {"h", 3600}, {"min", 60}, {"s", 1}};
constexpr int64_t kLongest = int64_t{100} * 366 * 86400;

}  // namespace

std::optional<int64_t> parse_seconds(std::string_view text) {
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || count < 0) return std::nullopt;
  std::string_view name = text.substr(static_cast<size_t>(end - text.data()));
  while (name.starts_with(' ')) name.remove_prefix(1);
  for (const Unit& unit : kUnits) {
    if (name != unit.name) continue;
    return count > kLongest / unit.seconds ? std::nullopt : std::optional(count * unit.seconds);
  }
  return std::nullopt;
}

std::string seconds_text(int64_t seconds) {
  for (const Unit& unit : kUnits) {
    const bool fits = seconds >= unit.seconds && seconds % unit.seconds == 0;
    if (fits) return std::to_string(seconds / unit.seconds) + std::string(unit.name);
  }
  return fmt::format("{}s", seconds);
}

}  // namespace lm
