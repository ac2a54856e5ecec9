#include "config/config_toml.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "base/bytes.h"
#include "base/error.h"
#include "config/config_check.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/nearest.h"
#include "config/toml_text.h"
#include "config/toml_value.h"
#include "config/words/word.h"

namespace lm {
namespace {

constexpr size_t kMostProblems = 50;  // are reported; suggestions for ten thousands would take seconds
constexpr const char* kNext = "correct it; `lmlaunch presets` lists commented configurations to start from";

Error config_error(std::string what, std::string place, std::string next) {
  return Error(
      Exit::kConfig,
      {.area = "CONF-20", .what = std::move(what), .place = std::move(place), .next = std::move(next)});
}

// Names come from the file: a newline in one must not look like one of our lines.
std::string one_line(const std::string& text) {
  std::string out;
  for (char c : escape_controls(text)) out += c == '\n' ? "\\n" : std::string(1, c);
  return out;
}

template <class List, class Name>
std::vector<std::string> names(const List& list, Name name) {
  std::vector<std::string> out;
  for (const auto& one : list) out.emplace_back(std::invoke(name, one));
  return out;
}

// Why an override that is no TOML is no bare word, either. "[" may begin a glob, "[0-9]*.jsonl"; with a quote
// behind it, or without a "]", it begins a list.
std::string broken_toml(const std::string& raw) {
  const size_t first = raw.find_first_not_of(" \t");
  if (first == std::string::npos) return "";
  if (raw[first] == '"' || raw[first] == '\'') return "a string that begins with a quote ends with one";
  if (raw[first] != '[') return "";
  const size_t next = raw.find_first_not_of(" \t", first + 1);
  const bool quoted = next != std::string::npos && (raw[next] == '"' || raw[next] == '\'');
  if (raw.find(']') == std::string::npos) return "the list is not closed: it ends with ]";
  return quoted ? "this list cannot be read; a list looks like [\"a\", \"b\"]" : "";
}

// log.to has replaced log.tensorboard: runs of earlier versions have recorded it, and "off" needs no
// replacement.
bool replaced_and_off(std::string_view table, std::string_view name, const toml::node& value) {
  return table == "log" && name == "tensorboard" && value.value<bool>() == false;
}

class Loader {
 public:
  explicit Loader(std::string place) : place_(std::move(place)) {
    for (const KeyText& key : known_) {
      if (tables_.empty() || tables_.back() != key.table) tables_.push_back(key.table);
    }
  }

  Config load(std::string_view text, const std::vector<std::string>& overrides) {
    file_ = parse_toml(text, place_);
    if (file_.mistake) problem(*file_.mistake, file_.mistake->text);
    for (auto&& [key, node] : file_.table) collect_table(key, node);
    for (const std::string& override_text : overrides) collect_override(override_text);
    visit_config(config_, *this);
    check();
    if (!problems_.empty()) fail();
    return std::move(config_);
  }

  void table(const char*, const char*) {}

  template <class T>
  void key(const char* table, const char* name, T& field, const KeyInfo& info) {
    const std::string full = std::string(table) + "." + name;
    const auto found = entries_.find(full);
    if (!info.used) {
      if (found != entries_.end())
        of_others_[full] += (of_others_[full].empty() ? "" : ", ") + std::string(info.rule);
      return;
    }
    used_.insert(full);
    if (found == entries_.end()) {
      if (info.required && value_text(field).size() <= 2 && !file_.mistake) {
        problem({place_, 0, 0, ""}, "`" + full + "` is missing: " + info.help);
        unusable_.insert(full);
      }
      return;
    }
    for (const Entry& entry : found->second) {  // the command line last
      if (read(entry, field, info)) continue;
      unusable_.insert(full);
      problem(entry.where, refusal(full, entry, static_cast<const T*>(nullptr), info));
    }
  }

 private:
  void problem(Problem where, std::string text) {
    if (++found_ > kMostProblems) return;
    where.text = one_line(text);
    problems_.push_back(std::move(where));
  }

  template <class T>
  std::string refusal(const std::string& full, const Entry& entry, const T* type, const KeyInfo& info) const {
    const auto text = word(entry);
    std::string got = got_text(*entry.node);
    if (const auto* list = entry.node->as_array(); list && list->size() < 9) {
      got = "[";
      for (const toml::node& node : *list) got += (got.size() > 1 ? ", " : "") + got_text(node);
      got += "]";
    }
    if (text && !printable(*text)) got += " with control characters";
    // value<double>() has no integers above 2^53.
    const auto* whole = entry.node->as_integer();
    const auto number = whole != nullptr ? std::optional<double>(static_cast<double>(whole->get()))
                                         : entry.node->value<double>();
    if (number && entry.node->is_number() && *number > info.range.high && info.range.high == kMostCounted)
      got += ", which is more than " + std::to_string(static_cast<int64_t>(kMostCounted));
    return "`" + full + "`: expected " + expected_text(type, info) + ", got " + got + word_hint(entry, type);
  }

  bool is_table(const std::string& name) const {
    return std::find(tables_.begin(), tables_.end(), name) != tables_.end();
  }

  // `outer`: "" or the table around it, which has tables alone: "eval." of [eval.generate].
  void collect_table(const toml::key& key, const toml::node& node, const std::string& outer = "") {
    const std::string name = outer + std::string(key.str());
    const Problem where = at(key.source(), place_);
    const bool known = is_table(name);
    const toml::table* table = node.as_table();
    if (table && std::ranges::any_of(tables_, [&](const auto& one) { return one.starts_with(name + "."); })) {
      for (auto&& [inner, value] : *table) collect_table(inner, value, name + ".");
      return;
    }
    if (!known && !table && !outer.empty()) {
      const std::string around = outer.substr(0, outer.size() - 1), mine(key.str());
      return problem(where,
                     "unknown key `" + shorten(mine) + "` in [" + around + "]" + nearest_key(around, mine));
    }
    if (!known && table) return problem(where, "unknown table [" + shorten(name) + "]" + nearest_table(name));
    if (!known)
      return problem(where, "unknown key `" + shorten(name) + "` outside of a table" + nearest_key("", name));
    if (!table)
      return problem(where, "`" + name + "`: expected a table, [" + name + "], got " + got_text(node));
    for (auto&& [inner, value] : *table) {
      if (replaced_and_off(name, inner.str(), value)) continue;
      if (!knows(name, std::string(inner.str()))) {
        problem(at(inner.source(), place_), "unknown key `" + shorten(std::string(inner.str())) + "` in [" +
                                                name + "]" + nearest_key(name, std::string(inner.str())));
        continue;
      }
      entries_[name + "." + std::string(inner.str())].push_back(
          {&value, at(value.source(), place_), "", false});
    }
  }

  // "train.steps=100": the value as TOML, else as a bare word.
  void collect_override(const std::string& text) {
    const Problem where{"command line", 0, 0, ""};
    const size_t equals = text.find('=');
    size_t dot = text.find('.');
    if (equals == std::string::npos || dot == std::string::npos || dot > equals) {
      return problem(where, "`" + shorten(text) + "`: expected table.key=value");
    }
    // The name of a table may have a point: "eval.generate.data".
    const size_t second = text.find('.', dot + 1);
    if (second < equals && is_table(text.substr(0, second))) dot = second;
    const std::string table = text.substr(0, dot), name = text.substr(dot + 1, equals - dot - 1);
    if (!knows(table, name)) {
      const std::string outer = name.substr(0, name.find('.'));
      if (outer != name && knows(table, outer))
        return problem(where, "`" + shorten(table + "." + name) + "`: this key is set as a whole, `" + table +
                                  "." + outer + "={NAME = VALUE, ...}`");
      return problem(where, "unknown key `" + shorten(table + "." + name) + "`" +
                                (is_table(table) ? nearest_key(table, name) : nearest_table(table)));
    }
    if (!overridden_.insert(table + "." + name).second) {
      return problem(where, "`" + table + "." + name + "` is given twice");
    }
    const std::string raw = text.substr(equals + 1);
    TomlText parsed = parse_toml("v = " + raw + "\n", "");
    if (parsed.mistake || parsed.table.size() != 1) {
      parsed = parse_toml("v = " + quote(raw) + "\n", "");
      if (const std::string why = broken_toml(raw); !parsed.mistake && !why.empty())
        return problem(where, "`" + table + "." + name + "`: " + why + ", got " + shorten(raw));
    }
    // A value in a run's config.toml must be UTF-8.
    if (parsed.mistake) return problem(where, "`" + table + "." + name + "`: the value is not UTF-8");
    auto value = std::make_unique<toml::table>(std::move(parsed.table));
    entries_[table + "." + name].push_back({value->get("v"), where, raw, true});
    override_values_.push_back(std::move(value));
  }

  bool knows(const std::string& table, const std::string& name) const {
    return std::any_of(known_.begin(), known_.end(),
                       [&](const KeyText& key) { return key.table == table && key.name == name; });
  }

  std::string nearest_table(const std::string& name) const {
    if (found_ >= kMostProblems) return "";
    const auto hit = nearest(name, tables_);
    if (hit) return "; did you mean [" + *hit + "]?";
    if (const std::string known = word_answer("", name); !known.empty()) return known;
    std::string all = "; there are";
    for (const std::string& table : tables_) all += " [" + table + "]";
    return all;
  }

  // Tries in this order: the same key of another table, another project's name for it, the nearest key of
  // this table, the nearest anywhere, the nearest name of another project.
  std::string nearest_key(const std::string& table, const std::string& name) const {
    if (found_ >= kMostProblems) return "";
    std::string elsewhere;
    std::vector<std::string> here;
    for (const KeyText& key : known_) {
      if (key.name == name)
        elsewhere += (elsewhere.empty() ? "; it belongs to [" : " or [") + key.table + "]";
      if (key.table == table) here.push_back(key.name);
    }
    if (!elsewhere.empty()) return elsewhere;
    if (const std::string known = word_answer(table, name); !known.empty()) return known;
    if (const auto hit = nearest(name, here)) return "; did you mean `" + *hit + "`?";
    static const std::vector<std::string> anywhere = names(known_keys(), &KeyText::name);
    static const std::vector<const Word*> words = words_with_keys();
    static const std::vector<std::string> theirs = names(words, &Word::theirs);
    if (const auto hit = nearest(name, anywhere)) {
      const auto key =
          std::find_if(known_.begin(), known_.end(), [&](const KeyText& k) { return k.name == *hit; });
      return "; did you mean `" + key->table + "." + *hit + "`?";
    }
    if (const auto hit = nearest(name, theirs)) {
      const auto other = std::ranges::find(words, *hit, &Word::theirs);
      return word_answer(**other);
    }
    return "";
  }

  void check() {
    if (file_.mistake) return;
    const auto given = [&](const std::string& key) { return entries_.count(key) != 0; };
    const auto usable = [&](const std::string& key) { return unusable_.count(key) == 0; };
    refuse_keys_of_other_rules();
    if (!given("optimizer.master")) {
      if (has_no_master(config_.optimizer.name)) config_.optimizer.master = Master::kNone;
      if (trains_fp32(config_) || scales_loss(config_)) config_.optimizer.master = Master::kF32;
    }
    // Two-pass global clipping finds overflows before any update, and with this threshold it clips nothing.
    if (scales_loss(config_) && config_.optimizer.clip == Clip::kNone) {
      config_.optimizer.clip = Clip::kGlobal;
      config_.train.max_grad_norm = kPositive.high;
    }
    if (given("optimizer.name") && usable("optimizer.name")) {
      const std::string written = word(entries_["optimizer.name"].back()).value_or("");
      if (written != name_of(config_.optimizer.name)) config_.optimizer.written = written;
    }
    if (config_.train.method == Method::kQlora) {
      config_.train.method = Method::kLora;
      if (!given("model.quantize")) config_.model.quantize = Quantize::kNf4;
      if (config_.model.quantize == Quantize::kNone)
        blame("model.quantize",
              "model.quantize = \"none\", and train.method = \"qlora\" trains adapters of a quantized model: "
              "set train.method = \"lora\" or leave model.quantize out");
    }
    for (const char* key : {"r", "alpha", "rslora", "dora", "bias", "targets", "exclude", "layers", "ranks",
                            "alphas", "also", "tokens"}) {
      if (given(std::string("lora.") + key)) config_.lora.written.emplace_back(key);
    }
    config_.prompt.length_written = given("prompt.length");
    let_overrides_win();
    for (const Conflict& conflict : find_conflicts(config_, given, usable))
      blame(conflict.key, conflict.text);
  }

  // Two rules may have a key of the same name. A rule chosen on the command line drops the file's keys.
  void refuse_keys_of_other_rules() {
    if (unusable_.count("optimizer.name") != 0) return;
    const bool chosen_later = overridden_.count("optimizer.name") != 0;
    for (const auto& [key, rules] : of_others_) {
      if (used_.count(key) == 0 && !(chosen_later && overridden_.count(key) == 0))
        blame(key, "`" + key + "` is a setting of " + rules + ", and optimizer.name = " +
                       value_text(config_.optimizer.name) + " has no such setting");
    }
  }

  // If two keys exclude each other, the one on the command line drops the file's.
  void let_overrides_win() {
    const auto wins = [&](const char* key, const char* other) {
      return overridden_.count(key) != 0 && overridden_.count(other) == 0;
    };
    TrainConfig& train = config_.train;
    if (train.steps && wins("train.steps", "train.epochs")) train.epochs.reset();
    if (train.epochs && wins("train.epochs", "train.steps")) train.steps.reset();
    DataConfig& data = config_.data;
    if (!data.eval.empty() && wins("data.eval", "data.eval_fraction")) data.eval_fraction = 0;
    if (data.eval_fraction > 0 && wins("data.eval_fraction", "data.eval")) data.eval = {};
    if (has_no_master(config_.optimizer.name) && wins("optimizer.name", "optimizer.master"))
      config_.optimizer.master = Master::kNone;
    // An fp32 model has neither a less precise adapter nor a bf16 master.
    if (config_.model.dtype == ModelDType::kF32) {
      if (wins("model.dtype", "lora.dtype")) config_.lora.dtype = LoraDType::kAuto;
      if (wins("model.dtype", "optimizer.master")) config_.optimizer.master = Master::kF32;
      if (wins("model.dtype", "train.gradients")) config_.train.gradients = GradientDType::kF32;
    }
    // An fp16 one has neither, and its master is no split.
    if (scales_loss(config_)) {
      if (wins("model.dtype", "lora.dtype") && config_.lora.dtype == LoraDType::kBF16)
        config_.lora.dtype = LoraDType::kAuto;
      if (wins("model.dtype", "optimizer.master") && config_.optimizer.master == Master::kSplit)
        config_.optimizer.master = Master::kF32;
      if (wins("model.dtype", "train.gradients")) config_.train.gradients = GradientDType::kF32;
    }
  }

  void blame(const std::string& key, const std::string& text) {
    const auto found = entries_.find(key);
    problem(found == entries_.end() ? Problem{place_, 0, 0, ""} : found->second.back().where, text);
  }

  [[noreturn]] void fail() {
    std::stable_sort(problems_.begin(), problems_.end(), [](const Problem& a, const Problem& b) {
      const auto order = [](const Problem& p) {
        return std::make_pair(p.line == 0 ? 1 << 30 : p.line, p.column);
      };
      return order(a) < order(b);
    });
    if (problems_.size() == 1) throw config_error(problems_[0].text, problems_[0].place(), kNext);
    std::string what = fmt::format("{} mistakes:", found_);
    for (const Problem& one : problems_) what += "\n  " + one.place() + ": " + one.text;
    if (found_ > problems_.size()) what += fmt::format("\n  and {} more", found_ - problems_.size());
    throw config_error(what, "", kNext);
  }

  std::string place_;
  const std::vector<KeyText>& known_ = known_keys();
  std::vector<std::string> tables_;
  TomlText file_;
  std::map<std::string, std::vector<Entry>> entries_;  // "train.steps" -> file first, command line last
  std::vector<std::unique_ptr<toml::table>> override_values_;
  std::set<std::string> overridden_, unusable_, used_;
  std::map<std::string, std::string>
      of_others_;  // given keys -> other optimizers, not chosen, that have them
  std::vector<Problem> problems_;
  size_t found_ = 0;  // problems, reported or not
  Config config_;
};

// Opened without blocking, so that a FIFO named as a configuration is refused instead of waiting for a
// writer.
std::string read_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    return config_error("cannot read the configuration: " + why, path,
                        "give the path of a TOML file; `lmlaunch presets` prints some to start from");
  };
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) throw refuse(std::strerror(errno));
  struct stat info {};
  std::string text;
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  int error = 0;
  char buffer[16384];
  for (ssize_t n = 1; regular && n != 0 && text.size() <= kConfigMostBytes && error == 0;) {
    n = ::read(fd, buffer, sizeof buffer);
    if (n > 0) text.append(buffer, static_cast<size_t>(n));
    if (n < 0 && errno != EINTR) error = errno;
  }
  close(fd);
  if (!regular) throw refuse("it is not a regular file");
  if (error != 0) throw refuse(std::strerror(error));
  return text;
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  return parse_config(read_file(path), path, overrides);
}

Config parse_config(const std::string& text, const std::string& place,
                    const std::vector<std::string>& overrides) {
  return Loader(place).load(text, overrides);
}

}  // namespace lm
