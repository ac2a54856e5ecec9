#include "launcher/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>

#include "base/bytes.h"
#include "base/error.h"
#include "config/config_print.h"
#include "config/nearest.h"
#include "launcher/command_table.h"

namespace lm {

Error usage_error(const std::string& what, const std::string& next) {
  return Error(Exit::kUsage, {.area = "USE-20", .what = what, .place = "the command line", .next = next});
}

int64_t asked_ranks(const CommandLine& line) {
  return std::max<int64_t>(line.integer("--ranks").value_or(line.integer("--gpus").value_or(1)), 1);
}

namespace {

std::string see_help(const CommandRow* row) {
  return row == nullptr ? "see `lmlaunch --help`" : std::string("see `lmlaunch ") + row->name + " --help`";
}

std::optional<int64_t> parse_count(const std::string& text) {
  int64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

std::optional<double> parse_number(const std::string& text) {
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = result.ec == std::errc() && result.ptr == text.data() + text.size();
  return whole && std::isfinite(value) && value >= 0 ? std::optional(value) : std::nullopt;
}

// Empty, or the mistake in a flag's value.
std::string value_error(const FlagRow& flag, const std::string& value) {
  const auto expected = [&](const char* what, const std::string& hint = "") {
    return std::string("expected ") + what + ", got \"" + value + "\"" + hint;
  };
  if (flag.takes == Takes::kCount && !parse_count(value)) return expected("a number of 0 or more");
  if (flag.takes == Takes::kNumber && !parse_number(value)) return expected("a number of 0 or more");
  if (flag.takes == Takes::kBytes && parse_bytes(value).value_or(0) <= 0) {
    const std::string meant = with_unit(value, "GiB");
    return expected("a size such as 24GiB", meant.empty() ? "" : " without a unit: " + meant + "?");
  }
  const bool text = flag.takes == Takes::kText || flag.takes == Takes::kTexts;
  return text && value.empty() && std::string(flag.name) != "--prompt" ? expected("a value") : "";
}

// True if a mistyped command is likelier than a configuration's path.
bool looks_like_command(const std::string& word) {
  return word.find_first_of("./") == std::string::npos;
}

// The first word that is no flag names the command; train's flags may stand before the configuration.
const CommandRow& command_of(const std::string& first) {
  const CommandRow* const row = find_command(first);
  if (row != nullptr) return *row;
  if (first.starts_with('-') || !looks_like_command(first)) return *find_command("train");
  const auto hit = nearest(first, command_names());
  throw usage_error("unknown command `" + first + "`" + (hit ? "; did you mean `" + *hit + "`?" : ""),
                    "see `lmlaunch --help`; a configuration's name ends in .toml");
}

// Registers a command's flags with CLI11; their values are read when all words are parsed. Every flag takes
// all of its values, so that a repeated one can be named.
std::map<std::string, CLI::Option*> add_flags(CLI::App& app, const CommandRow& row, Reader reader) {
  std::map<std::string, CLI::Option*> out;
  for (const FlagRow& flag : row.flags) {
    if (flag.hidden && reader == Reader::kCli) continue;
    if (flag.takes == Takes::kNothing) {
      out[flag.name] = app.add_flag(flag.name)->disable_flag_override();
    } else {
      const auto check = [&flag](const std::string& value) { return value_error(flag, value); };
      out[flag.name] =
          app.add_option(flag.name)->check(check)->expected(1)->allow_extra_args(false)->take_all();
    }
  }
  return out;
}

Error unknown_flag(const std::string& word, const CommandRow& row) {
  const std::string name = word.substr(0, word.find('='));
  const auto hit = nearest(name, flag_names(row.name));
  return usage_error(
      "unknown flag `" + name + "` of " + row.name + (hit ? "; did you mean `" + *hit + "`?" : ""),
      see_help(&row));
}

// Rewrites an error of CLI11, whose messages have no next step.
Error refused(const CLI::Error& error, const CLI::App& app, const CommandRow& row) {
  const std::string text = error.what();
  const std::vector<std::string> unknown = app.remaining();
  if (!unknown.empty()) return unknown_flag(unknown.front(), row);
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr) return usage_error(text, see_help(&row));
  // Its text begins with the flag; for a switch, without dashes.
  for (const FlagRow& flag : row.flags) {
    const std::string name = flag.name;
    if (text.starts_with(name + ":"))
      return usage_error(name + " needs a value: " + flag.value, see_help(&row));
    if (text.starts_with(name.substr(2) + " ")) return usage_error(name + " takes no value", see_help(&row));
  }
  return usage_error(text, see_help(&row));
}

// In the order in which CLI11 takes words. `--flag=` becomes two words, because CLI11 would take the next one
// as its value. A word with one dash is refused, because CLI11 would split it into a one-letter flag and its
// value.
std::vector<std::string> last_first(std::span<const std::string> words, const CommandRow& row) {
  std::vector<std::string> out;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") {
      out.insert(out.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
      break;
    }
    const bool empty_value = word.starts_with("--") && word.find('=') == word.size() - 1;
    if (word.size() > 2 && word[0] == '-' && word[1] != '-') throw unknown_flag(word, row);
    out.push_back(empty_value ? word.substr(0, word.size() - 1) : word);
    if (empty_value) out.emplace_back();
    const auto named = [&](const FlagRow& flag) { return flag.name == word; };
    const auto flag = std::ranges::find_if(row.flags, named);
    const bool takes_next = flag != row.flags.end() && flag->takes != Takes::kNothing;
    if (takes_next && i + 1 < words.size()) out.push_back(words[++i]);  // even if it looks like a flag
  }
  std::reverse(out.begin(), out.end());
  return out;
}

void take_flags(const CommandRow& row, const std::map<std::string, CLI::Option*>& options,
                CommandLine& line) {
  for (const FlagRow& flag : row.flags) {
    const auto option = options.find(flag.name);
    if (option == options.end() || option->second->empty()) continue;
    const std::vector<std::string>& values = option->second->results();
    if (flag.takes == Takes::kTexts) {
      line.lists[flag.name] = values;
    } else if (values.size() > 1) {
      throw usage_error(std::string(flag.name) + " is given twice", see_help(&row));
    } else {
      line.flags[flag.name] = flag.takes == Takes::kNothing ? "" : values.front();
    }
  }
}

void take_words(const CommandRow& row, const std::vector<std::string>& words, CommandLine& line) {
  for (const std::string& word : words) {
    if (line.positional.size() < row.most) {
      line.positional.push_back(word);
    } else if (row.overrides && word.find('=') != std::string::npos) {
      line.overrides.push_back(word);
    } else {
      throw usage_error(
          "unexpected argument `" + word + "`" + (row.overrides ? "; keys are set as table.key=value" : ""),
          see_help(&row));
    }
  }
}

// --override must name an existing key: a mistyped one would otherwise end as a change that was not allowed.
void check_overridden(const CommandLine& line) {
  std::vector<std::string> known;
  for (const KeyText& key : known_keys()) known.push_back(key.table + "." + key.name);
  for (const std::string& key : line.list("--override")) {
    if (std::ranges::find(known, key) != known.end()) continue;
    const auto hit = nearest(key, known);
    throw usage_error(
        "--override: there is no key `" + key + "`" + (hit ? "; did you mean `" + *hit + "`?" : ""),
        "`lmlaunch presets quickstart` shows every key");
  }
}

void check_elastic(const CommandLine& line) {
  if (!line.has("--elastic")) return;
  if (line.integer("--restarts").value_or(0) == 0) {
    throw usage_error(
        "--elastic without --restarts: only a run that starts again can change its number of ranks",
        "add --restarts N, the number of restarts that are allowed, or leave --elastic out");
  }
  if (asked_ranks(line) < 2) {
    throw usage_error("--elastic with one rank: there is none that the run could do without",
                      "add --gpus N or --ranks N with N of 2 or more, or leave --elastic out");
  }
}

void check_together(const CommandRow& row, const CommandLine& line) {
  const auto need = [&](bool there, const std::string& what) {
    if (!there) throw usage_error(line.command + " needs " + what, see_help(&row));
  };
  need(line.positional.size() >= row.least, row.arguments);
  const bool translates = line.has("--words") || line.lists.count("--from") != 0;
  if (line.command == "init" && !translates) need(line.positional.size() >= 2, row.arguments);
  if (line.command == "export" || line.command == "merge") need(line.has("-o"), "-o DIR");
  if (line.command == "generate") {
    need(line.has("--prompt") || line.has("--prompts"), "--prompt TEXT or --prompts FILE");
    if (line.has("--prompt") && line.has("--prompts"))
      throw usage_error("--prompt and --prompts exclude each other", see_help(&row));
  }
  const bool moves_files = line.command == "export" || line.command == "merge" || line.command == "verify" ||
                           line.command == "diff";
  if (moves_files && line.integer("--gpus").value_or(0) > 0) {
    throw usage_error(line.command + " takes no GPU: it reads and writes files, tensor by tensor, on the CPU",
                      "leave --gpus out");
  }
  check_overridden(line);
  check_elastic(line);
  if (line.has("--gpus") && line.has("--ranks")) {
    throw usage_error("--gpus and --ranks exclude each other", see_help(&row));
  }
}

std::string flag_help(const CommandRow& row) {
  std::string out;
  for (const FlagRow& flag : row.flags) {
    if (flag.hidden) continue;
    std::string left = "  ";
    left.append(flag.name).append(*flag.value ? " " : "").append(flag.value);
    left.resize(std::max<size_t>(left.size() + 2, 24), ' ');
    out += left + flag.help + "\n";
  }
  return out;
}

}  // namespace

std::vector<std::string> command_names() {
  std::vector<std::string> out;
  for (const CommandRow& row : commands()) out.emplace_back(row.name);
  return out;
}

std::vector<std::string> flag_names(const std::string& command) {
  std::vector<std::string> out = {"--help"};
  for (const FlagRow& flag : find_command(command)->flags) {
    if (!flag.hidden) out.emplace_back(flag.name);
  }
  return out;
}

std::optional<std::string> CommandLine::value(const std::string& flag) const {
  const auto found = flags.find(flag);
  return found == flags.end() ? std::nullopt : std::optional(found->second);
}

std::vector<std::string> CommandLine::list(const std::string& flag) const {
  const auto found = lists.find(flag);
  return found == lists.end() ? std::vector<std::string>() : found->second;
}

std::optional<int64_t> CommandLine::integer(const std::string& flag) const {
  const auto text = value(flag);
  return text ? parse_count(*text) : std::nullopt;
}

std::optional<double> CommandLine::number(const std::string& flag) const {
  const auto text = value(flag);
  return text ? parse_number(*text) : std::nullopt;
}

std::optional<int64_t> CommandLine::bytes(const std::string& flag) const {
  const auto text = value(flag);
  return text ? parse_bytes(*text) : std::nullopt;
}

CommandLine parse_command_line(const std::vector<std::string>& arguments, Reader reader) {
  if (arguments.empty()) {
    throw usage_error("nothing to do: lmlaunch needs a configuration or a command", see_help(nullptr));
  }
  const std::string& first = arguments.front();
  if (first == "--version") return CommandLine{"version", {}, {}, {}, {}};
  if (first == "--help" || first == "-h") {
    const bool one = arguments.size() > 1 && find_command(arguments[1]) != nullptr;
    return CommandLine{"help", one ? std::vector{arguments[1]} : std::vector<std::string>(), {}, {}, {}};
  }
  const CommandRow& row = command_of(first);
  CommandLine line{row.name, {}, {}, {}, {}};
  CLI::App app;
  app.set_help_flag("-h,--help");
  const std::map<std::string, CLI::Option*> flags = add_flags(app, row, reader);
  std::vector<std::string> words;
  app.add_option("words", words);
  try {
    app.parse(last_first(first == row.name ? std::span(arguments).subspan(1) : std::span(arguments), row));
  } catch (const CLI::CallForHelp&) {
    return CommandLine{"help", {row.name}, {}, {{"--help", ""}}, {}};
  } catch (const CLI::Error& error) {
    throw refused(error, app, row);
  }
  take_flags(row, flags, line);
  take_words(row, words, line);
  check_together(row, line);
  return line;
}

namespace {

const FlagRow* find_flag(const CommandLine& line, const std::string& flag) {
  const std::vector<FlagRow>& flags = find_command(line.command)->flags;
  const auto known =
      std::find_if(flags.begin(), flags.end(), [&](const FlagRow& f) { return f.name == flag; });
  return known == flags.end() ? nullptr : &*known;
}

std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=:,@%+-";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

std::string typed(const CommandLine& line) {
  CommandLine shown = line;
  std::erase_if(shown.flags, [&](const auto& flag) {
    const FlagRow* const known = find_flag(line, flag.first);
    return known != nullptr && known->hidden;
  });
  // Flags last: the command itself comes first.
  const std::vector<std::string> words = to_arguments(shown);
  const auto middle = std::find(words.begin(), words.end(), "--");
  std::string out = "lmlaunch";
  if (line.command != "train") out += " " + line.command;
  for (auto word = middle + 1; word != words.end(); ++word) out += " " + shell_word(*word);
  for (auto word = words.begin() + 1; word != middle; ++word) out += " " + shell_word(*word);
  return out;
}

std::vector<std::string> to_arguments(const CommandLine& line) {
  std::vector<std::string> out = {line.command};
  for (const auto& [flag, value] : line.flags) {
    out.push_back(flag);
    const FlagRow* const known = find_flag(line, flag);
    if (known != nullptr && known->takes != Takes::kNothing) out.push_back(value);
  }
  for (const auto& [flag, values] : line.lists) {
    for (const std::string& value : values) out.insert(out.end(), {flag, value});
  }
  out.push_back("--");  // a path may begin with a dash
  out.insert(out.end(), line.positional.begin(), line.positional.end());
  out.insert(out.end(), line.overrides.begin(), line.overrides.end());
  return out;
}

std::string help_text(const std::string& command) {
  const CommandRow* one = find_command(command);
  if (one != nullptr) {
    std::string usage = "lmlaunch ";
    return usage.append(one->name).append(" ").append(one->arguments).append("\n  ").append(one->help) +
           "\n\n" + flag_help(*one);
  }
  std::string out =
      "lmlaunch: exact, fast fine-tuning of language models\n\n"
      "  lmlaunch [--gpus N] [--dry-run] CONFIG.toml [table.key=value ...]\n\n";
  for (const CommandRow& row : commands()) {
    std::string left = "  ";
    left.append(row.name).append(" ").append(row.arguments);
    left.resize(std::max<size_t>(left.size() + 2, 44), ' ');
    out += left + row.help + "\n";
  }
  out.append("\n").append(flag_help(*find_command("train")));
  out +=
      "\n`lmlaunch COMMAND --help` prints a command's flags, `lmlaunch help KEY` what a key of the "
      "configuration\n"
      "does, `lmlaunch presets NAME` a commented configuration, `lmlaunch --version` the version.\n\nExit "
      "codes:\n";
  for (const ExitCode& row : exit_codes()) {
    const std::string code = std::to_string(static_cast<int>(row.code));
    out += std::string(4 - code.size(), ' ') + code + "  " + row.meaning + "\n";
  }
  return out;
}

}  // namespace lm
