// Any bytes as a run's configuration and as overrides of the command line behind it, separated by bytes 0xFF:
// refused with Error(10), or the configuration survives its text.
#include "config/config_print.h"
#include "config/config_toml.h"
#include "tests/fuzz/support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static lm::fuzz::MemoryFile memory;
  std::string_view rest = lm::fuzz::text_of(data, size);
  memory.set({lm::fuzz::next_text(rest)});
  std::vector<std::string> overrides;
  while (!rest.empty()) overrides.emplace_back(lm::fuzz::next_text(rest));
  const auto config =
      lm::fuzz::parse(lm::Exit::kConfig, [&] { return lm::load_config(memory.path(), overrides); });
  if (!config) return 0;
  const lm::Config again = lm::parse_config(lm::print_config(*config), "again");
  lm::fuzz::require(lm::same_config(*config, again) && lm::config_difference(*config, again).empty());
  return 0;
}
