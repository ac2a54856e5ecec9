// The commands and their flags, as a table: what command_line.h parses and prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

enum class Takes : uint8_t { kNothing, kText, kTexts, kCount, kNumber, kBytes };

struct FlagRow {
  const char* name;
  Takes takes;
  const char* value;  // its name in help
  const char* help;
  bool hidden = false;  // between the door and the rank
};

struct CommandRow {
  const char* name;
  const char* arguments;  // as in help
  const char* help;
  size_t least, most;  // positional arguments
  bool overrides;
  std::vector<FlagRow> flags;
};

// In the order of the help.
const std::vector<CommandRow>& commands();
const CommandRow* find_command(const std::string& name);  // null: there is none

}  // namespace lm
