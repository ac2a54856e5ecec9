// TOML text to a toml++ table, made safe and complete: size and nesting are capped before the parser sees the
// text, and duplicates and numbers that do not fit are collected instead of ending the parse at the first.
// Knows TOML, not our keys. Only config_toml.cpp and toml_text.cpp include toml++ (2 s of compile time).
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Hostile text reaches assertions of toml++ 3.3 ("[{[" does): they would abort a debug build and be promises
// to clang's optimizer in a release. Without them the parser reports an error, which is what we want of both.
#define TOML_EXCEPTIONS 0
#define TOML_ASSERT(expression) static_assert(true)
#pragma push_macro("NDEBUG")
#undef NDEBUG
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

namespace lm {

inline constexpr size_t kConfigMostBytes = 1 << 20;
inline constexpr int kConfigMostNesting = 32;

// One thing wrong, where. line 0: no place in a file.
struct Problem {
  std::string file;  // or "command line"
  int line = 0, column = 0;
  std::string text;
  std::string place() const {
    return line == 0 ? file : file + ":" + std::to_string(line) + ":" + std::to_string(column);
  }
};

struct TomlText {
  toml::table table;
  std::vector<Problem> problems;
  bool complete = true;  // false: the table holds what stands before a syntax error
  // Numbers no 64-bit type can hold: (line, column) -> as written; the table has inf in their place.
  std::map<std::pair<int, int>, std::string> unfit_numbers;
  // Second [headers] of a table, under a name of their own in `table` -> the table's name.
  std::map<std::string, std::string> repeated_tables;
};

TomlText parse_toml(std::string text, const std::string& place);

}  // namespace lm
