#include "launcher/command_line.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/bytes.h"
#include "base/error.h"
#include "config/nearest.h"
#include "launcher/command_table.h"

namespace lm {
namespace {

Error usage_error(const std::string& what, const std::string& next) {
  return Error(Exit::kUsage,
               {.area = "USE-20", .what = what, .place = "the command line", .next = next, .kept = ""});
}

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

void check_value(const FlagRow& flag, const std::string& value, const CommandRow& row) {
  const auto refuse = [&](const char* expected, const std::string& hint = "") {
    throw usage_error(std::string(flag.name) + ": expected " + expected + ", got \"" + value + "\"" + hint,
                      see_help(&row));
  };
  if (flag.takes == Takes::kCount && !parse_count(value)) refuse("a number of 0 or more");
  if (flag.takes == Takes::kNumber && !parse_number(value)) refuse("a number of 0 or more");
  if (flag.takes == Takes::kBytes && parse_bytes(value).value_or(0) <= 0) {
    const std::string meant = with_unit(value, "GiB");
    refuse("a size such as 24GiB", meant.empty() ? "" : " without a unit: " + meant + "?");
  }
  const bool text = flag.takes == Takes::kText || flag.takes == Takes::kTexts;
  if (text && value.empty() && std::string(flag.name) != "--prompt") refuse("a value");
}

// True where a mistyped command is likelier than a configuration's path.
bool looks_like_command(const std::string& word) {
  return word.find_first_of("./") == std::string::npos;
}

class Reading {
 public:
  Reading(const std::vector<std::string>& arguments, Reader reader) : rest_(arguments), reader_(reader) {}

  CommandLine read() {
    if (rest_.empty()) {
      throw usage_error("nothing to do: lmlaunch needs a configuration or a command", see_help(nullptr));
    }
    choose_command();
    if (row_ == nullptr) return std::move(line_);
    bool only_positional = false;
    for (; at_ < rest_.size(); ++at_) {
      const std::string& word = rest_[at_];
      if (!only_positional && word == "--") {
        only_positional = true;
      } else if (!only_positional && (word == "--help" || word == "-h")) {
        return CommandLine{"help", {row_->name}, {}, {}, {}};
      } else if (!only_positional && word.size() > 1 && word[0] == '-') {
        take_flag(word);
      } else {
        take_positional(word);
      }
    }
    check_counts();
    return std::move(line_);
  }

 private:
  // The first word that is no flag names the command; flags of training may stand before the configuration.
  void choose_command() {
    const std::string& first = rest_[0];
    if (first == "--help" || first == "-h" || first == "help") {
      line_.command = "help";
      if (rest_.size() > 1 && find_command(rest_[1])) line_.positional = {rest_[1]};
      return;
    }
    if (first == "--version") {
      line_.command = "version";
      return;
    }
    row_ = find_command(first);
    if (row_ != nullptr) {
      at_ = 1;
    } else if (first[0] != '-' && looks_like_command(first)) {
      const auto hit = nearest(first, command_names());
      throw usage_error("unknown command `" + first + "`" + (hit ? "; did you mean `" + *hit + "`?" : ""),
                        "see `lmlaunch --help`; a configuration's name ends in .toml");
    } else {
      row_ = find_command("train");
    }
    line_.command = row_->name;
  }

  void take_flag(const std::string& word) {
    const size_t equals = word.starts_with("--") ? word.find('=') : std::string::npos;
    const std::string name = word.substr(0, equals);
    const FlagRow* flag = nullptr;
    for (const FlagRow& row : row_->flags) {
      if (row.name == name && !(row.hidden && reader_ == Reader::kDoor)) flag = &row;
    }
    if (flag == nullptr) {
      const auto hit = nearest(name, flag_names(row_->name));
      throw usage_error(
          "unknown flag `" + name + "` of " + row_->name + (hit ? "; did you mean `" + *hit + "`?" : ""),
          see_help(row_));
    }
    std::string value;
    if (flag->takes == Takes::kNothing) {
      if (equals != std::string::npos) throw usage_error(name + " takes no value", see_help(row_));
    } else if (equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else if (at_ + 1 < rest_.size()) {
      value = rest_[++at_];
    } else {
      throw usage_error(name + " needs a value: " + flag->value, see_help(row_));
    }
    check_value(*flag, value, *row_);
    if (flag->takes == Takes::kTexts) {
      line_.lists[name].push_back(value);
    } else if (!line_.flags.emplace(name, value).second) {
      throw usage_error(name + " is given twice", see_help(row_));
    }
  }

  void take_positional(const std::string& word) {
    if (line_.positional.size() < row_->most) {
      line_.positional.push_back(word);
    } else if (row_->overrides && word.find('=') != std::string::npos) {
      line_.overrides.push_back(word);
    } else {
      throw usage_error(
          "unexpected argument `" + word + "`" + (row_->overrides ? "; keys are set as table.key=value" : ""),
          see_help(row_));
    }
  }

  void check_counts() const {
    const auto need = [&](bool there, const std::string& what) {
      if (!there) throw usage_error(line_.command + " needs " + what, see_help(row_));
    };
    need(line_.positional.size() >= row_->least, row_->arguments);
    if (line_.command == "export") need(line_.has("-o"), "-o DIR");
    if (line_.command == "generate") need(line_.has("--prompt"), "--prompt TEXT");
    const bool moves_files = line_.command == "export" || line_.command == "verify";
    if (moves_files && line_.integer("--gpus").value_or(0) > 0) {
      throw usage_error(
          line_.command + " takes no GPU: it reads and writes files, tensor by tensor, on the CPU",
          "leave --gpus out");
    }
    if (line_.has("--gpus") && line_.has("--ranks")) {
      throw usage_error("--gpus and --ranks exclude each other", see_help(row_));
    }
  }

  const std::vector<std::string>& rest_;
  Reader reader_;
  const CommandRow* row_ = nullptr;
  size_t at_ = 0;
  CommandLine line_;
};

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
  return Reading(arguments, reader).read();
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
  // Flags last: what is done stands first.
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
      "\n`lmlaunch COMMAND --help` tells a command's flags, `lmlaunch presets NAME` prints a commented\n"
      "configuration, `lmlaunch --version` the version.\n\nExit codes:\n";
  for (const ExitCode& row : exit_codes()) {
    const std::string code = std::to_string(static_cast<int>(row.code));
    out += std::string(4 - code.size(), ' ') + code + "  " + row.meaning + "\n";
  }
  return out;
}

bool needs_torch(const std::string& command) {
  const CommandRow* row = find_command(command);
  return row != nullptr && row->torch;
}

}  // namespace lm
