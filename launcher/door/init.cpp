#include <fmt/format.h>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <map>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "data/look.h"
#include "launcher/door/commands.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"
#include "spec/model_spec.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLengths[] = {2048, 1024, 512, 256, 128};  // tokens of a sequence, until something fits

Error refusal(Exit code, const std::string& what, const std::string& place, const std::string& next) {
  return Error(code, {.area = "INIT-20", .what = what, .place = place, .next = next});
}

std::string output_of(const CommandLine& line) {
  if (const auto given = line.value("-o")) return *given;
  const fs::path model = fs::path(line.positional[0]).lexically_normal();
  const fs::path name = model.filename().empty() ? model.parent_path().filename() : model.filename();
  return (name.empty() ? "config" : name.string()) + ".toml";
}

// A name that is none of a file, a glob or ORG/NAME is a slip of the keyboard.
void check_data(const std::string& data) {
  std::error_code ignored;
  if (fs::exists(data, ignored) || data.find_first_of("*?[{~") != std::string::npos) return;
  const fs::path path(data);
  const std::string end = path.extension();  // ".jsonl"; of ORG/OpenHermes-2.5 it is a part of the version
  const bool file = end.size() > 1 && std::isalpha(static_cast<unsigned char>(end[1])) != 0;
  if (path.is_relative() && path.has_parent_path() && !file) return;
  throw refusal(Exit::kInput, "no such data file", data,
                "name files, globs, or ORG/NAME of a data set in the local hub cache");
}

// The first rows, as training will read them.
void look(const std::vector<std::string>& data) {
  const Environment environment = read_environment();
  if (environment.python.empty()) {
    log_note("INIT-20", "no Python was found, so that nobody has looked at the data: see `lmlaunch doctor`");
    return;
  }
  const fs::path program =
      fs::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  look_at_rows(data, {environment.hub_caches, environment.datasets_caches}, environment.python,
               program.lexically_normal().string());
}

// What MODEL names: a model; or an adapter, which is gone on with.
struct Start {
  std::string model, adapter;  // "": a fresh one, if any
};

Start start_of(const CommandLine& line) {
  Config config;
  config.model.path = line.positional[0];
  if (line.value("--method") != "full") config.train.method = Method::kLora;
  settle_model(config, read_environment());
  return {config.model.path, config.lora.init};
}

// What a user would write: everything else stays as it is.
std::string base_text(const CommandLine& line, const Start& start, int64_t length) {
  const std::vector<std::string> data(line.positional.begin() + 1, line.positional.end());
  std::string text =
      fmt::format("model.path = {}\ndata.train = {}\ndata.max_length = {}\ndata.eval_fraction = 0.02\n",
                  quote(start.model), value_text(data), length);
  if (line.integer("--gpus") == 0) text += "run.device = \"cpu\"\n";
  if (const auto disks = line.list("--disk"); !disks.empty())
    text += "offload.paths = " + value_text(disks) + "\n";
  if (start.adapter.empty()) return text + "train.method = \"full\"\n";
  return text + "train.method = \"lora\"\nlora.init = " + quote(start.adapter) + "\n";
}

struct FittingWays {
  int64_t length = 0;
  std::vector<Alternative> ways;  // the first is taken
};

FittingWays choose(const CommandLine& line, const Start& start, const std::string& output) {
  const ModelSpec spec = read_model_spec(resolve_model(start.model, read_environment()));
  const std::string method = line.value("--method").value_or("");
  std::vector<Alternative> least;
  for (const int64_t most : kLengths) {
    const int64_t length = std::min(most, spec.max_positions);
    if (length < most && most != kLengths[0] && length < kLengths[std::size(kLengths) - 1]) break;
    const Config config = parse_config(base_text(line, start, length), output, {});
    FittingWays choice{length, ways_to_train(config, output, line)};
    std::erase_if(choice.ways, [&](const Alternative& way) {
      const bool asked = method.empty() || way.method == method;
      return !asked || (!start.adapter.empty() && way.method == "full");
    });
    std::erase_if(choice.ways, [&](const Alternative& way) {
      // Of a disk that nobody has named there are only imagined ways.
      if (way.setting_text().find("DIRECTORY") != std::string::npos) return true;
      if (!way.plan.fits) least.push_back(way);
      return !way.plan.fits;
    });
    if (choice.ways.empty()) continue;
    // Of the method that is fastest, what changes least: a newcomer meets one unusual thing at a time.
    const std::string fastest = choice.ways.front().method;
    const auto simplest = std::ranges::min_element(choice.ways, {}, [&](const Alternative& way) {
      return std::pair(way.method != fastest, way.settings.size());
    });
    std::rotate(choice.ways.begin(), simplest, simplest + 1);
    return choice;
  }
  throw refusal(
      Exit::kDoesNotFit,
      (method.empty() ? std::string("no way to train this model") : "train.method = \"" + method + "\"") +
          (least.empty() ? " is possible here"
                         : " does not fit this machine: the least takes " +
                               format_bytes(least.back().plan.peak.host) + " of its memory"),
      line.positional[0],
      line.list("--disk").empty() ? "name a directory on a fast disk with --disk, or take a smaller model"
                                  : "take a smaller model");
}

// As TOML: settings of a command line may be bare words.
std::string toml_value(const std::string& value) {
  const bool word =
      std::isalpha(static_cast<unsigned char>(value.front())) && value != "true" && value != "false";
  return word ? quote(value) : value;
}

// Lines of a table, in the order of the file.
struct Tables {
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> rows;

  // "table.key" and "key = value  # why"; a later line of a key takes the place of the earlier one.
  void set(const std::string& key, const std::string& value, const std::string& why = "") {
    const size_t dot = key.find('.');
    const std::string table = key.substr(0, dot), name = key.substr(dot + 1);
    auto found = std::ranges::find_if(rows, [&](const auto& row) { return row.first == table; });
    if (found == rows.end()) found = rows.insert(rows.end(), {table, {}});
    std::string text = name + " = " + value;
    if (!why.empty()) text.resize(std::max<size_t>(text.size() + 2, 34), ' ');
    if (!why.empty()) text += "# " + why;
    const auto same = std::ranges::find_if(found->second, [&](const auto& one) { return one.first == name; });
    if (same != found->second.end()) {
      same->second = text;
    } else {
      found->second.emplace_back(name, text);
    }
  }
  std::string text() const {
    std::string out;
    for (const auto& [table, lines] : rows) {
      out += "\n[" + table + "]\n";
      for (const auto& [name, line] : lines) out += line + "\n";
    }
    return out;
  }
};

std::string learning_rate(const Alternative& way) {
  return way.method == "full" ? "2e-5" : "2e-4";
}

bool sets(const Alternative& way, const std::string& key) {
  return std::ranges::any_of(way.settings,
                             [&](const std::string& one) { return one.starts_with(key + "="); });
}

// What makes `other` of a file that was written for `way`; "" where that file sets more than `other` does.
std::string settings_from(const Alternative& way, const Alternative& other) {
  for (const std::string& setting : way.settings) {
    const std::string key = setting.substr(0, setting.find('='));
    if (key != "train.method" && !sets(other, key)) return "";
  }
  std::string out;
  if (!sets(other, "train.method")) out = "train.method=" + other.method;
  for (const std::string& setting : other.settings) out += (out.empty() ? "" : " ") + setting;
  return learning_rate(way) == learning_rate(other) ? out : out + " optimizer.lr=" + learning_rate(other);
}

std::string config_text(const CommandLine& line, const Start& start, const std::string& output,
                        const FittingWays& choice) {
  const Alternative& way = choice.ways.front();
  const bool adapter = way.method != "full";
  const std::vector<std::string> data(line.positional.begin() + 1, line.positional.end());
  char speed[64];
  std::snprintf(speed, sizeof speed, "%.0f tokens per second", way.tokens_per_second());
  std::string out = "# " + line.positional[0] + ", for the machine on which `lmlaunch init` was called: ";
  if (way.plan.peak.device > 0) out += format_bytes(way.plan.peak.device) + " of the GPU's memory, ";
  out += format_bytes(way.plan.peak.host) + " of memory" +
         (way.plan.peak.disk > 0 ? ", " + format_bytes(way.plan.peak.disk) + " of disk" : "") +
         ",\n# about " + speed + ". What goes where: lmlaunch plan " + output + "   Start it: lmlaunch " +
         output + "\n# Every other key and what it does: `lmlaunch help TABLE`, or docs/configuration.md.\n";
  Tables tables;
  if (line.integer("--gpus") == 0) tables.set("run.device", "\"cpu\"");
  tables.set("model.path", quote(start.model), "a directory, or ORG/NAME in the local hub cache");
  tables.set("data.train", value_text(data), "JSONL, JSON, Parquet, CSV, text");
  tables.set("data.eval_fraction", "0.02", "of the examples, held out to see what was learnt");
  tables.set("data.max_length", std::to_string(choice.length), "tokens; longer conversations are cut");
  tables.set("train.method", quote(way.method),
             adapter ? "a small adapter beside the frozen model" : "all weights");
  tables.set("train.epochs", "1", "passes over the data");
  tables.set("train.global_batch", "8", "sequences per step");
  tables.set("optimizer.lr", learning_rate(way), "the first thing to try others of");
  tables.set("optimizer.schedule", "\"cosine\"");
  tables.set("optimizer.warmup", "0.03", "of all steps");
  if (!start.adapter.empty()) {
    tables.set("lora.init", quote(start.adapter), "the adapter that is gone on with");
  } else if (adapter) {
    tables.set("lora.r", "8", "rank: more learns more, and costs more");
  }
  if (const auto disks = line.list("--disk"); !disks.empty())
    tables.set("offload.paths", value_text(disks), "for what memory cannot hold");
  for (const std::string& setting : way.settings) {
    const size_t equals = setting.find('=');
    const std::string key = setting.substr(0, equals);
    if (key != "train.method")
      tables.set(key, toml_value(setting.substr(equals + 1)), "so that it fits, or is faster");
  }
  out += tables.text();
  std::string others;
  int listed = 0;
  for (const Alternative& other : choice.ways) {
    const std::string settings = &other == &way ? "" : settings_from(way, other);
    if (settings.empty() || listed == 4) continue;
    ++listed;
    std::snprintf(speed, sizeof speed, "#   %6.0f tokens/s  ", other.tokens_per_second());
    others += speed + settings + "\n";
  }
  if (!others.empty()) out += "\n# Other ways that fit, with what to set for them:\n" + others;
  return out;
}

}  // namespace

Exit init_command(const CommandLine& line) {
  if (line.has("--words") || !line.list("--from").empty()) return init_from_command(line);
  const std::string output = output_of(line), method = line.value("--method").value_or("");
  if (!method.empty() && method != "full" && method != "lora" && method != "qlora")
    throw refusal(Exit::kUsage, "--method: expected full, lora or qlora, got \"" + method + "\"",
                  "the command line", "see `lmlaunch init --help`");
  const std::vector<std::string> data(line.positional.begin() + 1, line.positional.end());
  std::ranges::for_each(data, check_data);
  std::error_code ignored;
  if (fs::exists(output, ignored))
    throw refusal(Exit::kIncompatible, "the file exists already, and is left as it is", output,
                  "remove it, or name another one with -o");
  const Start start = start_of(line);
  look(data);
  const FittingWays choice = choose(line, start, output);
  const std::string text = config_text(line, start, output, choice);
  parse_config(text, output, {});  // what is written is read
  atomic_write_file(output, text);
  std::printf("%s\n", output.c_str());
  return Exit::kDone;
}

}  // namespace lm
