// The table of commands and their flags, which command_line.h parses and prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

enum class Takes : uint8_t { kNothing, kText, kTexts, kCount, kNumber, kBytes };

struct FlagRow {
  const char* name;
  Takes takes;
  const char* value;  // name of the value in help
  const char* help;
  bool hidden = false;  // passed by the CLI to the worker only
};

struct CommandRow {
  const char* name;
  const char* arguments;  // as in help
  const char* help;
  size_t least, most;  // number of positional arguments
  bool overrides;
  std::vector<FlagRow> flags;
};

// In the order of the help.
const std::vector<CommandRow>& commands();
const CommandRow* find_command(const std::string& name);  // null: none

}  // namespace lm
