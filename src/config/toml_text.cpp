#include "config/toml_text.h"

#include <fmt/format.h>

#include <algorithm>

namespace lm {
namespace {

// A mistake, and its byte in the text.
struct Mistake {
  size_t at = 0;
  std::string what;
};

// One past the string that begins at `at`.
size_t end_of_string(std::string_view text, size_t at) {
  const char mark = text[at];
  const std::string triple(3, mark);
  const bool many_lines = text.substr(at, 3) == triple;
  for (at += many_lines ? 3 : 1; at < text.size(); ++at) {
    if (text[at] == '\\' && mark == '"') {
      ++at;
    } else if (many_lines && text.substr(at, 3) == triple) {
      // Up to two more quotes belong to the string that they end.
      return std::min(text.find_first_not_of(mark, at + 3), std::min(at + 5, text.size()));
    } else if (!many_lines && (text[at] == mark || text[at] == '\n')) {
      return at + (text[at] == mark);  // the parser reports a string that is not closed
    }
  }
  return text.size();
}

// Walks the text as a TOML lexer would (strings and comments skipped) and finds what the parser must not see:
// nesting that drives its recursion too deep (brackets, or dots in one key; toml++ overflows the stack at 256
// under a sanitizer), and non-ASCII characters outside of strings (toml++ 3.3 takes some for white space).
std::optional<Mistake> hostile_text(std::string_view text) {
  int brackets = 0, dots = 0;
  for (size_t at = 0, next = 0; at < text.size(); at = next) {
    const char c = text[at];
    next = c == '"' || c == '\'' ? end_of_string(text, at) : c == '#' ? text.find('\n', at) : at + 1;
    if (static_cast<unsigned char>(c) >= 0x80)
      return Mistake{at, "a character that is not ASCII, outside of a string"};
    if (c == '[' || c == '{') ++brackets;
    if (c == ']' || c == '}') brackets = std::max(0, brackets - 1);
    if (c == '.') ++dots;
    if (c == '\n' || c == '=' || c == ',') dots = 0;
    if (brackets > kConfigMostNesting || dots > kConfigMostNesting)
      return Mistake{at, fmt::format("nested deeper than {} levels", kConfigMostNesting)};
  }
  return std::nullopt;
}

// toml++ counts columns in characters.
bool begins_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
}

size_t line_start(std::string_view text, size_t at) {
  return text.substr(0, at).rfind('\n') + 1;  // npos + 1 is 0
}

Problem problem_at(std::string_view text, const Mistake& mistake, const std::string& place) {
  const std::string_view before = text.substr(0, mistake.at);
  const std::string_view line = before.substr(line_start(text, mistake.at));
  return {place, static_cast<int>(std::ranges::count(before, '\n')) + 1,
          static_cast<int>(std::ranges::count_if(line, begins_character)) + 1, mistake.what};
}

Mistake mistake_of(const toml::parse_error& error, std::string_view text) {
  const toml::source_position place = error.source().begin;
  size_t at = 0;
  for (toml::source_index line = 1; line < place.line; ++line) at = text.find('\n', at) + 1;
  const size_t end = std::min(text.find('\n', at), text.size());
  for (toml::source_index column = 1; at < end; ++at) {
    column += begins_character(text[at]);
    if (column > place.column) break;
  }
  return {at, std::string(error.description())};
}

// "key `lr` of [optimizer] is given twice; first in line 9". `table`: of the lines above.
void reword_duplicate(Mistake& mistake, std::string_view text, const std::string& above,
                      const toml::table& table) {
  const size_t start = std::min(text.find_first_not_of(" \t", above.size()), mistake.at);
  const bool header = text.substr(start, 1) == "[";
  const size_t quote = mistake.what.find('\'') + 1;
  const std::string name = mistake.what.substr(quote, mistake.what.size() - 1 - quote);
  mistake.what = header ? "table [" + name + "]" : "key `" + name + "`";
  const size_t open = header ? std::string::npos : ("\n" + above).rfind("\n[");
  const std::string inside =
      open == std::string::npos ? "" : above.substr(open + 1, above.find(']', open) - open - 1);
  const auto first = table.at_path(inside.empty() ? name : inside + "." + name);
  if (first && !inside.empty()) mistake.what += " of [" + inside + "]";
  mistake.what += " is given twice";
  if (first)
    mistake = {start, fmt::format("{}; first in line {}", mistake.what, first.node()->source().begin.line)};
}

// Rewrites toml++'s messages in the style of ours, and points to where a number or a duplicate begins.
// `table`: of the lines above.
void reword(Mistake& mistake, std::string_view text, const std::string& above, const toml::table& table) {
  std::string& what = mistake.what;
  const auto says = [&](const char* part) { return what.find(part) != std::string::npos; };
  if (says("cannot redefine existing") && what.ends_with('\'')) {
    reword_duplicate(mistake, text, above, table);
  } else if (says("not representable in 64 bits") || says("could not be interpreted as a value")) {
    const size_t begin = text.substr(0, mistake.at).find_last_of(" \t\n=[{,") + 1;
    const std::string_view number = text.substr(begin, mistake.at - begin);
    mistake = {begin, fmt::format("the number {} does not fit 64 bits", number)};
  } else if (says("control characters") && text.substr(mistake.at, 1) == "\n") {
    what = "the string is not closed in its line";
  }
  const std::string_view lead = "Error while parsing ";
  if (what.starts_with(lead)) what.erase(0, lead.size());
}

}  // namespace

TomlText parse_toml(std::string_view text, const std::string& place) {
  if (text.size() > kConfigMostBytes) {
    const std::string what =
        fmt::format("the file has {} bytes; at most {} are read", text.size(), kConfigMostBytes);
    return {{}, Problem{place, 1, 1, what}};
  }
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  std::optional<Mistake> mistake = hostile_text(text);
  if (!mistake) {
    toml::parse_result result = toml::parse(text, place);
    if (result) return {std::move(result).table(), {}};
    mistake = mistake_of(result.error(), text);
  }
  // The keys of the lines above are still checked, so that one more mistake needs no further attempt.
  const std::string above(text.substr(0, line_start(text, mistake->at)));
  toml::parse_result keys = toml::parse(above, place);
  toml::table table = keys ? std::move(keys).table() : toml::table();
  reword(*mistake, text, above, table);
  return {std::move(table), problem_at(text, *mistake, place)};
}

}  // namespace lm
