// The command line as a value: one table of commands and flags serves parsing, help and spelling suggestions.
// The CLI parses what the user typed; the worker parses what the CLI passes (`<command> <arguments>`, with
// the hidden flags) with the same function. Pure; errors are Error(2).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace lm {

enum class Reader : uint8_t { kCli, kWorker };

struct CommandLine {
  std::string command;                                    // "train", "plan", ..., "help", "version"
  std::vector<std::string> positional;                    // e.g. the configuration's path
  std::vector<std::string> overrides;                     // "table.key=value", in order
  std::map<std::string, std::string> flags;               // "--gpus" -> "1", "--json" -> ""
  std::map<std::string, std::vector<std::string>> lists;  // flags that may be repeated

  bool has(const std::string& flag) const { return flags.count(flag) != 0; }
  std::optional<std::string> value(const std::string& flag) const;
  std::vector<std::string> list(const std::string& flag) const;
  std::optional<int64_t> integer(const std::string& flag) const;  // checked by the parser
  std::optional<double> number(const std::string& flag) const;    // the same, with a fraction
  std::optional<int64_t> bytes(const std::string& flag) const;    // the same, of sizes such as 24GiB
};

// All names that can be typed: every command, and its flags, --help included.
std::vector<std::string> command_names();
std::vector<std::string> flag_names(const std::string& command);

// `arguments` without the program's name.
CommandLine parse_command_line(const std::vector<std::string>& arguments, Reader reader);

// The reverse: `line` as arguments that parse to the same value.
std::vector<std::string> to_arguments(const CommandLine& line);
// What a user types into a shell for `line`, without the hidden flags.
std::string typed(const CommandLine& line);

// How many ranks a command line asks for with --ranks or --gpus; default: 1.
int64_t asked_ranks(const CommandLine& line);

// A usage error, Error(2); `next`: what to type instead.
Error usage_error(const std::string& what, const std::string& next);

// Help of the whole program ("") or of one command.
std::string help_text(const std::string& command);

}  // namespace lm
