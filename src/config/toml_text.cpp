#include "config/toml_text.h"

#include <fmt/format.h>
#include <algorithm>
#include <cctype>

namespace lm {
namespace {

constexpr int kMostRounds = 40;  // parses of one text; each removes one collected problem

bool word_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-';
}

// Walks the text as a TOML lexer would (strings and comments skipped) and finds what the parser must not see:
// nesting that drives its recursion too deep (brackets, or dots in one key; toml++ overflows the stack at 256
// under a sanitizer), and characters outside of ASCII where TOML has none (toml++ 3.3 takes some for white
// space).
class TextScan {
 public:
  explicit TextScan(std::string_view text) : text_(text), at_(text.starts_with("\xEF\xBB\xBF") ? 3 : 0) {}
  // The first trouble; "" if there is none. It is at byte `at` of line `line`.
  std::string first_trouble(size_t* at, int* line) {
    std::string trouble;
    while (at_ < text_.size() && trouble.empty()) {
      const char c = text_[at_];
      if (c == '"' || c == '\'') {
        skip_string(c);
      } else if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else {
        trouble = step(c);
        if (trouble.empty()) ++at_;
      }
    }
    *at = at_;
    *line = line_;
    return trouble;
  }

 private:
  std::string step(char c) {
    if (static_cast<unsigned char>(c) >= 0x80) return "a character that is not ASCII, outside of a string";
    if (c == '\n') ++line_;
    if (c == '[' || c == '{') ++brackets_;
    if (c == ']' || c == '}') brackets_ = std::max(0, brackets_ - 1);
    if (c == '.') ++dots_;
    if (c == '\n' || c == '=' || c == ',') dots_ = 0;
    const bool deep = brackets_ > kConfigMostNesting || dots_ > kConfigMostNesting;
    return deep ? fmt::format("nested deeper than {} levels", kConfigMostNesting) : "";
  }
  void skip_string(char mark) {
    const std::string triple(3, mark);
    const bool many_lines = text_.substr(at_, 3) == triple;
    at_ += many_lines ? 3 : 1;
    while (at_ < text_.size()) {
      if (text_[at_] == '\\' && mark == '"') {
        line_ += at_ + 1 < text_.size() && text_[at_ + 1] == '\n';
        at_ = std::min(at_ + 2, text_.size());
      } else if (many_lines ? text_.substr(at_, 3) == triple : text_[at_] == mark) {
        at_ += many_lines ? 3 : 1;
        // Up to two more marks belong to the string that they end.
        for (int more = 0; many_lines && more < 2 && at_ < text_.size() && text_[at_] == mark; ++more) ++at_;
        return;
      } else if (text_[at_] == '\n' && !many_lines) {
        return;  // a syntax error; the parser says so
      } else {
        line_ += text_[at_] == '\n';
        ++at_;
      }
    }
  }

  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1, brackets_ = 0, dots_ = 0;
};

// [first byte, one past the last) of a line, counted from 1, without its newline.
std::pair<size_t, size_t> line_bounds(const std::string& text, int line) {
  size_t first = 0;
  for (int i = 1; i < line && first != std::string::npos; ++i) {
    first = text.find('\n', first);
    if (first != std::string::npos) ++first;
  }
  if (first == std::string::npos) return {text.size(), text.size()};
  return {first, std::min(text.find('\n', first), text.size())};
}

// toml++ counts columns in characters.
int column_of(const std::string& text, size_t line_first, size_t at) {
  int column = 1;
  for (size_t i = line_first; i < at; ++i) column += (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
  return column;
}

// The part between the first pair of single quotes.
std::string quoted_part(const std::string& description) {
  const size_t first = description.find('\''), last = description.rfind('\'');
  return first == std::string::npos || last <= first ? "" : description.substr(first + 1, last - first - 1);
}

// toml++ says "Error while parsing key-value pair: cannot redefine ..."; the second half is enough.
// An open string runs into the newline, which it calls a control character.
std::string plain_reason(std::string description, bool at_line_end) {
  if (at_line_end && description.find("control characters") != std::string::npos) {
    return "the string is not closed in its line";
  }
  const std::string lead = "Error while parsing ";
  if (description.starts_with(lead)) description = description.substr(lead.size());
  return description;
}

class Parser {
 public:
  Parser(std::string text, const std::string& place) : text_(std::move(text)), place_(place) {}

  TomlText parse();

 private:
  void report(int line, int column, std::string what) {
    out_.problems.push_back({place_, line, column, std::move(what)});
  }

  bool set_unfit_number_aside(int line, const std::string& description);
  bool set_duplicate_aside(int line, const std::string& description);
  void keep_what_parses(int error_line);

  std::string text_;  // as given, but for what has been set aside; columns stay as they are
  std::string place_;
  TomlText out_;
};

// 1e999 and 2^63: replaced by inf, remembered as written; the reader of the key says what it accepts.
bool Parser::set_unfit_number_aside(int line, const std::string& description) {
  const bool unfit = description.find("not representable") != std::string::npos ||
                     description.find("could not be interpreted as a value") != std::string::npos;
  const std::string digits = quoted_part(description);
  if (!unfit || digits.size() < 4) return false;
  const auto [first, last] = line_bounds(text_, line);
  size_t end = first;
  for (size_t at = first; at < last; at = end) {
    end = at;
    while (end < last && (word_character(text_[end]) || text_[end] == '+' || text_[end] == '.')) ++end;
    const std::string token = text_.substr(at, end - at);
    std::string bare = token;
    std::erase(bare, '_');
    if (bare.starts_with('+') || bare.starts_with('-')) bare.erase(0, 1);
    if (bare == digits) {
      out_.unfit_numbers[{line, column_of(text_, first, at)}] = token;
      text_.replace(at, token.size(), "inf" + std::string(token.size() - 3, ' '));
      return true;
    }
    end = std::max(end, at + 1);
  }
  return false;
}

// The line of the first mention of `path` (plain dotted keys) in the text before `line`; 0 if it is not
// found.
int first_mention(const std::string& text, size_t before, const std::string& path) {
  toml::parse_result result = toml::parse(std::string_view(text).substr(0, before));
  if (!result) return 0;
  const toml::node_view<toml::node> node = std::move(result).table().at_path(path);
  return node ? static_cast<int>(node.node()->source().begin.line) : 0;
}

// A key or [header] given twice: reported, then taken out of the way. A repeated header keeps its keys, under
// another name, so that they are checked too; a repeated key becomes a comment if its value ends on its line.
bool Parser::set_duplicate_aside(int line, const std::string& description) {
  if (description.find("cannot redefine existing") == std::string::npos) return false;
  const auto [first, last] = line_bounds(text_, line);
  const size_t start = text_.find_first_not_of(" \t", first);
  if (start >= last) return false;
  const std::string name = quoted_part(description), statement = text_.substr(start, last - start);
  const int column = column_of(text_, first, start);
  if (statement.starts_with('[')) {
    if (name.empty() || statement.starts_with("[[")) return false;
    const int before = first_mention(text_, first, name);
    report(line, column,
           "table [" + name + "] is given twice" + (before ? fmt::format("; first in line {}", before) : ""));
    const std::string other = fmt::format("lmlaunch-again-{}", out_.repeated_tables.size());
    out_.repeated_tables[other] = name;
    text_.replace(start, last - start, "[" + other + "]");
    return true;
  }
  std::string header;
  for (size_t at = 0; at < first; at = std::min(text_.find('\n', at), text_.size()) + 1) {
    const size_t open = text_.find_first_not_of(" \t", at);
    if (open == std::string::npos || open >= first || text_[open] != '[') continue;
    const size_t close = text_.find(']', open);
    if (close != std::string::npos && close < first) header = text_.substr(open + 1, close - open - 1);
  }
  const int before = first_mention(text_, first, header.empty() ? name : header + "." + name);
  const bool alone = toml::parse(std::string_view(statement)).succeeded();
  report(line, column,
         "key `" + name + "`" + (header.empty() ? "" : " of [" + header + "]") + " is given twice" +
             (before ? fmt::format("; first in line {}", before) : ""));
  if (!alone) {
    keep_what_parses(line);
    return false;
  }
  text_[start] = '#';
  return true;
}

// After a syntax error: the keys before its line are still checked, so that one more mistake does not cost
// one more attempt.
void Parser::keep_what_parses(int error_line) {
  out_.complete = false;
  const size_t before = line_bounds(text_, error_line).first;
  toml::parse_result result =
      toml::parse(std::string_view(text_).substr(0, before), std::string_view(place_));
  if (result) out_.table = std::move(result).table();
}

TomlText Parser::parse() {
  if (text_.size() > kConfigMostBytes) {
    out_.complete = false;
    report(1, 1, fmt::format("the file has {} bytes; at most {} are read", text_.size(), kConfigMostBytes));
    return std::move(out_);
  }
  size_t at = 0;
  int line = 0;
  const std::string trouble = TextScan(text_).first_trouble(&at, &line);
  if (!trouble.empty()) {
    report(line, column_of(text_, line_bounds(text_, line).first, at), trouble);
    keep_what_parses(line);
    return std::move(out_);
  }
  for (int round = 0;; ++round) {
    toml::parse_result result = toml::parse(std::string_view(text_), std::string_view(place_));
    if (result) {
      out_.table = std::move(result).table();
      return std::move(out_);
    }
    const int line = static_cast<int>(result.error().source().begin.line);
    const std::string description(result.error().description());
    if (round < kMostRounds) {
      const size_t reported = out_.problems.size();
      if (set_unfit_number_aside(line, description) || set_duplicate_aside(line, description)) continue;
      if (out_.problems.size() > reported) return std::move(out_);  // a duplicate that ends the parse
    }
    const int column = static_cast<int>(result.error().source().begin.column);
    const auto [first, last] = line_bounds(text_, line);
    report(line, column, plain_reason(description, column_of(text_, first, last) <= column));
    keep_what_parses(line);
    return std::move(out_);
  }
}

}  // namespace

TomlText parse_toml(std::string text, const std::string& place) {
  return Parser(std::move(text), place).parse();
}

}  // namespace lm
