#include <fmt/format.h>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "data/look.h"
#include "launcher/cli/commands.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"
#include "weights/model_directory.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLengths[] = {2048, 1024, 512, 256, 128};  // tokens of a sequence, to try
constexpr int64_t kLengthStep = 64;  // lengths taken from the data are multiples of it
constexpr double kWorthIt = 1.1;     // fp32 takes twice the memory: bf16 is kept if it is about as fast

Error refusal(Exit code, const std::string& what, const std::string& place, const std::string& next) {
  return Error(code, {.area = "INIT-20", .what = what, .place = place, .next = next});
}

std::string output_of(const CommandLine& line) {
  if (const auto given = line.value("-o")) return *given;
  const fs::path model = fs::path(line.positional[0]).lexically_normal();
  const fs::path name = model.filename().empty() ? model.parent_path().filename() : model.filename();
  return (name.empty() ? "config" : name.string()) + ".toml";
}

// A name that is no file, glob or ORG/NAME is a typing mistake.
void check_data(const std::string& data) {
  std::error_code ignored;
  if (fs::exists(data, ignored) || data.find_first_of("*?[{~") != std::string::npos) return;
  const fs::path path(data);
  const std::string end = path.extension();  // ".jsonl"; in ORG/OpenHermes-2.5 part of the version
  const bool file = end.size() > 1 && std::isalpha(static_cast<unsigned char>(end[1])) != 0;
  if (path.is_relative() && path.has_parent_path() && !file) return;
  throw refusal(Exit::kInput, "no such data file", data,
                "name files, globs, or ORG/NAME of a data set in the local hub cache");
}

// Reads the first rows, as training will read them.
SeenRows look(const std::vector<std::string>& data, const std::string& model_dir) {
  const Environment environment = read_environment();
  if (environment.python.empty()) {
    log_note("INIT-20", "no Python was found, so the data was not inspected: see `lmlaunch doctor`");
    return {};
  }
  const fs::path program =
      fs::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  return look_at_rows(data, {environment.hub_caches, environment.datasets_caches}, model_dir,
                      environment.python, program.lexically_normal().string());
}

// What MODEL names: a model, or an adapter to train further.
struct Start {
  std::string model, adapter;  // adapter "": a new one, if any
};

Start start_of(const CommandLine& line) {
  Config config;
  config.model.path = line.positional[0];
  if (line.value("--method") != "full") config.train.method = Method::kLora;
  settle_model(config, read_environment());
  return {config.model.path, config.lora.init};
}

// Lengths to try, the longest first: the data's, at most the model's context length; then shorter ones, which
// need less memory. 2048 for plain text, which is split, and for unknown data.
std::vector<int64_t> lengths_to_try(const SeenRows& seen, int64_t positions) {
  const bool known = seen.examples > seen.texts;
  const int64_t rounded = (seen.length + kLengthStep - 1) / kLengthStep * kLengthStep;
  const int64_t most = positions > 0 ? positions : kLengths[0];
  std::vector<int64_t> out = {std::min(known ? rounded : kLengths[0], most)};
  for (const int64_t shorter : kLengths) {
    if (shorter < out.back()) out.push_back(shorter);
  }
  return out;
}

// The comment that explains the chosen length.
std::string reason_of(int64_t length, const SeenRows& seen, int64_t positions) {
  const bool whole = length >= seen.length, longest = seen.length == seen.longest;
  std::string out = whole                 ? "tokens"
                    : length == positions ? "tokens, the model's context length"
                                          : "tokens, what fits";
  if (seen.examples > seen.texts) {
    out += longest ? fmt::format(": the longest of {} examples has {}", seen.examples, seen.longest)
                   : fmt::format(": of {} examples 99.5 % have at most {}, the longest {}", seen.examples,
                                 seen.length, seen.longest);
    if (whole && longest && seen.examples == seen.rows) return out;
  }
  return out + "; longer conversations are cut";
}

struct FittingWays {
  int64_t length = 0;
  const char* dtype = "bf16";
  std::string length_reason, dtype_reason;
  std::vector<Alternative> ways;  // the first is chosen
};

const char* learning_rate(const std::string& method) {
  return method == "full" ? "2e-5" : "2e-4";
}

// A configuration for one method, as a user would write it; planned first, and then written.
ConfigLines config_lines(const CommandLine& line, const Start& start, const FittingWays& choice,
                         const std::string& method) {
  const std::vector<std::string> data(line.positional.begin() + 1, line.positional.end());
  const bool adapter = method != "full";
  ConfigLines out;
  if (line.integer("--gpus") == 0) out.set("run.device", quote("cpu"));
  out.set("model.path", quote(start.model), "a directory, or ORG/NAME in the local hub cache");
  out.set("model.dtype", quote(choice.dtype), choice.dtype_reason);
  out.set("data.train", value_text(data), "JSONL, JSON, Parquet, CSV, text");
  out.set("data.eval_fraction", "0.02", "share of the examples held out for evaluation");
  out.set("data.max_length", std::to_string(choice.length), choice.length_reason);
  out.set("train.method", quote(method), adapter ? "a small adapter beside the frozen model" : "all weights");
  out.set("train.epochs", "1", "passes over the data");
  out.set("train.global_batch", "8", "sequences per step");
  out.set("optimizer.lr", learning_rate(method), "learning rate; the first key to tune");
  out.set("optimizer.schedule", quote("cosine"));
  out.set("optimizer.warmup", "0.03", "share of all steps");
  if (!start.adapter.empty()) {
    out.set("lora.init", quote(start.adapter), "the adapter to train further");
  } else if (adapter) {
    out.set("lora.r", "8", "rank: a higher one learns more and costs more");
  }
  if (const auto disks = line.list("--disk"); !disks.empty())
    out.set("offload.paths", value_text(disks), "for offloaded state");
  return out;
}

// The requested ways that fit; those that do not fit are added to `least`.
std::vector<Alternative> fitting_ways(const CommandLine& line, const Start& start, const std::string& output,
                                      const FittingWays& choice, std::vector<Alternative>& least) {
  const std::string method = line.value("--method").value_or("");
  const ConfigLines lines = config_lines(line, start, choice, start.adapter.empty() ? "full" : "lora");
  const Config config = parse_config(lines.text(), output, {});
  std::vector<Alternative> ways = ways_to_train(config, output, line);
  std::erase_if(ways, [&](const Alternative& way) {
    const bool asked = method.empty() || way.method == method;
    return !asked || (!start.adapter.empty() && way.method == "full");
  });
  std::erase_if(ways, [&](const Alternative& way) {
    // Ways with an unnamed disk are only imagined.
    if (way.setting_text().find("DIRECTORY") != std::string::npos) return true;
    // Another dtype is compared separately, with its own reason.
    if (std::ranges::any_of(way.settings, [](const auto& one) { return one.starts_with("model.dtype="); }))
      return true;
    if (!way.plan.fits) least.push_back(way);
    return !way.plan.fits;
  });
  return ways;
}

// bf16, unless this processor is slower with it: not all have instructions for it. All supported GPUs have.
void choose_dtype(FittingWays& choice, std::vector<Alternative> fp32) {
  if (fp32.empty() || choice.ways.front().plan.peak.device > 0) return;
  const double bf16_speed = choice.ways.front().tokens_per_second();
  const double fp32_speed = fp32.front().tokens_per_second();
  const bool faster = fp32_speed > kWorthIt * bf16_speed;
  const char* const how = faster ? "faster here" : "half the memory of fp32";
  choice.dtype_reason =
      fmt::format("{}: about {:.0f} tokens/s, with {} {:.0f}", how, faster ? fp32_speed : bf16_speed,
                  faster ? "bf16" : "fp32", faster ? bf16_speed : fp32_speed);
  if (!faster) return;
  choice.dtype = "fp32";
  choice.ways = std::move(fp32);
}

FittingWays choose(const CommandLine& line, const Start& start, const std::string& output,
                   const ModelSpec& spec, const SeenRows& seen) {
  const std::string method = line.value("--method").value_or("");
  std::vector<Alternative> least, ignored;
  for (const int64_t length : lengths_to_try(seen, spec.max_positions)) {
    FittingWays choice;
    choice.length = length;
    choice.length_reason = reason_of(length, seen, spec.max_positions);
    FittingWays wide = choice;
    wide.dtype = "fp32";
    choice.ways = fitting_ways(line, start, output, choice, least);
    if (choice.ways.empty()) continue;
    choose_dtype(choice, fitting_ways(line, start, output, wide, ignored));
    // The fastest method with the fewest changed settings: a newcomer should meet one unusual setting at a
    // time.
    const std::string fastest = choice.ways.front().method;
    const auto simplest = std::ranges::min_element(choice.ways, {}, [&](const Alternative& way) {
      return std::pair(way.method != fastest, way.settings.size());
    });
    std::rotate(choice.ways.begin(), simplest, simplest + 1);
    return choice;
  }
  const std::string what =
      method.empty() ? "no training method fits" : "train.method = \"" + method + "\" does not fit";
  throw refusal(Exit::kDoesNotFit,
                least.empty() ? what + " this machine"
                              : what + " this machine: the smallest takes " +
                                    format_bytes(least.back().plan.peak.host) + " of its memory",
                line.positional[0],
                line.list("--disk").empty()
                    ? "name a directory on a fast disk with --disk, or take a smaller model"
                    : "take a smaller model");
}

bool sets(const Alternative& way, const std::string& key) {
  return std::ranges::any_of(way.settings,
                             [&](const std::string& one) { return one.starts_with(key + "="); });
}

// The overrides that turn the file written for `way` into `other`; "" if that file sets a key that `other`
// does not.
std::string settings_from(const Alternative& way, const Alternative& other) {
  for (const std::string& setting : way.settings) {
    const std::string key = setting.substr(0, setting.find('='));
    if (key != "train.method" && !sets(other, key)) return "";
  }
  std::string out;
  if (!sets(other, "train.method")) out = "train.method=" + other.method;
  for (const std::string& setting : other.settings) out += (out.empty() ? "" : " ") + setting;
  const std::string before = learning_rate(way.method), after = learning_rate(other.method);
  return before == after ? out : out + " optimizer.lr=" + after;
}

std::string config_text(const CommandLine& line, const Start& start, const std::string& output,
                        const FittingWays& choice) {
  const Alternative& way = choice.ways.front();
  std::string out = "# " + line.positional[0] + ", for the machine on which `lmlaunch init` was called: ";
  if (way.plan.peak.device > 0) out += format_bytes(way.plan.peak.device) + " of the GPU's memory, ";
  out += format_bytes(way.plan.peak.host) + " of memory" +
         (way.plan.peak.disk > 0 ? ", " + format_bytes(way.plan.peak.disk) + " of disk" : "") +
         fmt::format(",\n# about {:.0f} tokens per second", way.tokens_per_second()) +
         ". Memory and placement: lmlaunch plan " + output + "   Start it: lmlaunch " + output +
         "\n# Every other key and what it does: `lmlaunch help TABLE`, or docs/configuration.md.\n";
  ConfigLines lines = config_lines(line, start, choice, way.method);
  for (const std::string& setting : way.settings) {
    const size_t equals = setting.find('=');
    const std::string key = setting.substr(0, equals), value = setting.substr(equals + 1);
    // These values are strings.
    if (key != "train.method") lines.set(key, quote(value), "so that it fits, or is faster");
  }
  out += "\n" + lines.text();
  std::string others;
  int listed = 0;
  for (const Alternative& other : choice.ways) {
    const std::string settings = &other == &way ? "" : settings_from(way, other);
    if (settings.empty() || listed == 4) continue;
    ++listed;
    others += fmt::format("#   {:6.0f} tokens/s  {}\n", other.tokens_per_second(), settings);
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
    throw refusal(Exit::kIncompatible, "the file already exists, and was not changed", output,
                  "remove it, or name another one with -o");
  const Start start = start_of(line);
  const std::string model_dir = resolve_model(start.model, read_environment());
  const SeenRows seen = look(data, model_dir);
  const FittingWays choice = choose(line, start, output, read_model_spec(model_dir), seen);
  const std::string text = config_text(line, start, output, choice);
  parse_config(text, output, {});  // checks the written text
  atomic_write_file(output, text);
  std::printf("%s\n", output.c_str());
  return Exit::kDone;
}

}  // namespace lm
