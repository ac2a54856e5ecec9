// Any bytes as a run's configuration and as overrides of the command line behind it, separated by bytes 0xFF:
// refused with Error(10), or the configuration survives its text.
#include <set>

#include "config/config_print.h"
#include "config/config_toml.h"
#include "tests/fuzz/support.h"
#include "tests/support/same_config.h"

namespace {

// Each line behind its table, so that those of two tables differ.
template <class Use>
void for_each_line(std::string_view text, const Use& use) {
  std::string_view table;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.starts_with('[')) table = line;
    use(table, line);
  }
}

// The text without the keys that have their defaults: to read these back would be two thirds of the time.
std::string text_of_others(const lm::Config& config) {
  using Line = std::pair<std::string, std::string>;
  static const std::set<Line> defaults = [] {
    std::set<Line> out;
    for_each_line(lm::print_config({}), [&](auto table, auto line) { out.emplace(table, line); });
    return out;
  }();
  std::string out;
  for_each_line(lm::print_config(config), [&](auto table, auto line) {
    if (line.starts_with('[') || !defaults.contains(Line(table, line))) out += std::string(line) + "\n";
  });
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static lm::fuzz::MemoryFile memory;
  std::string_view rest = lm::fuzz::text_of(data, size);
  memory.set({lm::fuzz::next_text(rest)});
  std::vector<std::string> overrides;
  while (!rest.empty()) overrides.emplace_back(lm::fuzz::next_text(rest));
  const auto config =
      lm::fuzz::parse(lm::Exit::kConfig, [&] { return lm::load_config(memory.path(), overrides); });
  if (!config) return 0;
  const lm::Config again = lm::parse_config(text_of_others(*config), "again");
  lm::fuzz::require(lm::same_config(*config, again) && lm::config_difference(*config, again).empty());
  return 0;
}
