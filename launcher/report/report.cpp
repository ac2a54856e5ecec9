#include "launcher/report/report.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "launcher/presets.h"
#include "launcher/recorded.h"
#include "launcher/report/page.h"
#include "launcher/status.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// A refresh takes at most this share of one core.
constexpr double kShare = 1.0 / 400;
constexpr double kFirst = 5, kLeast = 20;  // seconds

constexpr size_t kMostLines = 60;       // of the log's end
constexpr size_t kMostText = 16 << 10;  // bytes of notes, data, sample

// Notes, data lines and the sample of log.txt.
struct LogParts {
  std::string data, notes, sample, end;
  int64_t total_steps = 0;
};

void append(std::string& text, const std::string& line) {
  if (text.size() + line.size() < kMostText) text += line + "\n";
}

LogParts read_log(const std::string& path) {
  LogParts out;
  std::deque<std::string> end;
  bool sampling = false;
  std::ifstream file(path, std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    end.push_back(line);
    if (end.size() > kMostLines) end.pop_front();
    if (line.starts_with("step ")) {
      if (const size_t slash = line.find('/'); slash != std::string::npos)
        out.total_steps = std::max<int64_t>(out.total_steps, std::atoll(line.c_str() + slash + 1));
      continue;
    }
    const bool data = line.starts_with("data: ");
    if (data) sampling = false;
    if (sampling) append(out.sample, line);
    if (data && out.data.find(line) == std::string::npos) append(out.data, line);
    if (line.starts_with("lmlaunch: note ") || line.starts_with("lmlaunch: warning "))
      append(out.notes, line);
    if (line.starts_with("one example, trained text")) {
      sampling = true;
      out.sample.clear();  // only the newest start's
    }
  }
  for (const std::string& line : end) out.end += line + "\n";
  return out;
}

// The part of the configuration on a run's page and card: the base model, and [key, default, value] of every
// key whose value is not its default. Resolved "auto" values are left out: two machines resolve them
// differently.
struct Settings {
  std::string base;
  bool lora = false;
  std::string method = "full";
  Json changed = Json::array();
  Json preset;  // {name, settings}: the same against the preset that it was made from; null: none
};

Json changes(const Config& from, const Config& to, const std::vector<std::string>& resolved) {
  Json out = Json::array();
  const std::vector<KeyText> before = list_keys(from), after = list_keys(to);
  for (size_t i = 0; i < after.size(); ++i) {
    const std::string key = after[i].table + "." + after[i].name;
    if (before[i].value == quote("auto") && std::ranges::find(resolved, key) != resolved.end()) continue;
    const bool secret = after[i].name == "webhook";  // a secret: pages are passed on
    if (after[i].value != before[i].value && !secret) out.push_back({key, before[i].value, after[i].value});
  }
  return out;
}

Settings settings_of(const std::string& path) {
  Settings out;
  try {
    const Config config = load_config(path);
    out.base = config.model.path;
    out.lora = config.train.method == Method::kLora;
    out.method = name_of(config.train.method);
    const std::string text = read_small_file(path, kMiB);
    const std::vector<std::string> resolved = auto_keys(text);
    out.changed = changes(Config(), config, resolved);
    if (const Preset* const preset = find_preset(preset_of(text)))
      out.preset = {{"name", preset->name},
                    {"settings", changes(parse_config(preset->text, preset->name), config, resolved)}};
  } catch (const Error&) {
    // a run that died before it had one, or another version's: no settings
  }
  return out;
}

Json checkpoints(const std::string& directory) {
  std::vector<std::pair<std::string, int64_t>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (!fs::exists(entry.path() / kManifestName, error)) continue;
    int64_t bytes = 0;
    for (const auto& file : fs::directory_iterator(entry.path(), error)) {
      const auto size = file.file_size(error);
      if (!error) bytes += static_cast<int64_t>(size);
    }
    found.emplace_back(entry.path().filename().string(), bytes);
  }
  std::ranges::sort(found);
  Json out = Json::array();
  for (const auto& [name, bytes] : found) out.push_back({{"name", name}, {"bytes", bytes}});
  return out;
}

// Revision of a model of the hub; "": none.
std::string base_revision(const std::string& run) {
  try {
    return read_json_file(run + "/" + kBaseModelFile, {.bytes = 4096, .depth = 2})
        .at("revision")
        .get<std::string>();
  } catch (const std::exception&) {
    return "";
  }
}

Json plan_of(const std::string& path) {
  try {
    Json plan = read_json_file(path, {.bytes = 16 << 20, .depth = 16});
    Json out = Json::object();
    for (const char* key : {"peak", "tiers", "links", "traffic", "timeline", "phases", "binding",
                            "step_seconds", "tokens_per_s", "sol_pct"}) {
      if (plan.contains(key)) out[key] = plan[key];
    }
    return out;
  } catch (const Error&) {
    return Json::object();  // died before it had one
  }
}

Json status_of(const std::string& directory, int64_t step) {
  const std::optional<RunStatus> status = read_status(directory);
  if (!status)
    return {{"state", "unknown"}, {"step", step}, {"reason", "no status.json"}, {"exit_code", nullptr}};
  return {{"state", status->state},
          {"step", std::max(status->step, step)},
          {"reason", status->reason},
          {"exit_code", status->exit_code ? Json(*status->exit_code) : Json()}};
}

std::string name_of(const std::string& directory) {
  std::error_code error;
  return (fs::absolute(directory, error) / "").lexically_normal().parent_path().filename().string();
}

}  // namespace

RunReport::RunReport(std::string directory)
    : directory_(std::move(directory)), curves_(directory_ + "/metrics.jsonl") {}

Json RunReport::record() {
  curves_.read();
  const LogParts log = read_log(directory_ + "/log.txt");
  const Settings settings = settings_of(directory_ + "/config.toml");
  const Json series = curves_.series();
  const int64_t step = series["step"].empty() ? 0 : series["step"].back().get<int64_t>();
  return {{"name", name_of(directory_)},
          {"directory", directory_},
          {"version", LM_VERSION},
          {"status", status_of(directory_, step)},
          {"total_steps", log.total_steps},
          {"series", series},
          {"eval", curves_.evaluations()},
          {"scores", curves_.scores()},
          {"answers", curves_.answers()},
          {"measured", curves_.totals()},
          {"plan", plan_of(directory_ + "/plan.json")},
          {"base", settings.base},
          {"revision", base_revision(directory_)},
          {"lora", settings.lora},
          {"method", settings.method},
          {"settings", settings.changed},
          {"preset", settings.preset},
          {"checkpoints", checkpoints(directory_ + "/checkpoints")},
          {"data", log.data},
          {"notes", log.notes},
          {"sample", log.sample},
          {"log", log.end}};
}

std::string report_page(const std::vector<Json>& records) {
  const std::string text = Json(records).dump(-1, ' ', false, Json::error_handler_t::replace);
  const std::string page = kReportPage;
  constexpr std::string_view kMark = "@RUNS@";
  const size_t at = page.find(kMark);
  LM_CHECK(at != std::string::npos, "page.html has no placeholder for the runs");
  std::string out = page.substr(0, at);
  // A "<" in a text must not end the script that contains it.
  for (const char c : text) c == '<' ? out += "\\u003c" : out += c;
  return out + page.substr(at + kMark.size());
}

LiveReport::LiveReport(const std::string& directory, double (*clock)())
    : run_(directory), path_(directory + "/report.html"), clock_(clock), due_(clock() + kFirst) {}

void LiveReport::refresh() {
  const double start = clock_();
  if (start < due_) return;
  finish();
  const double end = clock_();
  due_ = end + std::max(kLeast, (end - start) / kShare);
}

void LiveReport::finish() {
  std::error_code error;
  if (!fs::exists(run_.directory() + "/plan.json", error)) return;
  try {
    atomic_write_file(path_, report_page({run_.record()}));
  } catch (const std::exception& error) {  // a failed report never ends the run
    if (!std::exchange(said_, true))
      log_note("FILE-03", "report.html cannot be written: " + std::string(error.what()));
  }
}

}  // namespace lm
