// `lmlaunch diff`: where two runs part. It reads their directories without a lock, and trains nothing.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "checkpoint/state_difference.h"
#include "config/config_text.h"
#include "launcher/recorded.h"
#include "launcher/status.h"
#include "launcher/worker/exported_names.h"
#include "launcher/worker/row_difference.h"
#include "launcher/worker/setting_difference.h"
#include "launcher/worker/worker_commands.h"

namespace lm {
namespace {

using OrderedJson = nlohmann::ordered_json;
using Runs = std::array<std::string, 2>;  // directories

// A step at which both runs have a checkpoint.
struct CommonCheckpoint {
  int64_t step = 0;
  std::vector<ValueDifference> sources;  // tokenizer, data, version of lmlaunch
  StateDifference weights;
  std::optional<StateDifference> optimizer;  // compared where the weights are equal
  bool equal() const { return weights.equal() && optimizer && optimizer->equal(); }
};

struct RunDifference {
  Runs runs;
  std::array<std::optional<RunStatus>, 2> status;
  SettingDifference settings;
  RowDifference rows;
  std::vector<CommonCheckpoint> checkpoints;
  std::vector<std::string> next;  // commands that give checkpoints to compare
  bool equal() const { return !rows.first && std::ranges::all_of(checkpoints, &CommonCheckpoint::equal); }
  // The step of the checkpoints that `next` gives.
  int64_t step_again() const { return rows.first.value_or(rows.last_compared); }
};

std::vector<FoundCheckpoint> readable_checkpoints(const std::string& run) {
  std::vector<FoundCheckpoint> found = find_checkpoints(run + "/checkpoints");
  for (const FoundCheckpoint& one : found) {
    if (!one.manifest) log_warning("CKPT-02", one.path + " is not compared: " + one.problem);
  }
  std::erase_if(found, [](const FoundCheckpoint& one) { return !one.manifest; });
  return found;
}

// Steps at which both runs have a checkpoint, ascending. If the metrics part at `first`: the newest before it
// and the first from it on.
std::vector<int64_t> common_steps(const Runs& runs, const std::optional<int64_t>& first) {
  std::vector<int64_t> steps, out;
  const std::vector<FoundCheckpoint> others = readable_checkpoints(runs[1]);
  for (const FoundCheckpoint& one : readable_checkpoints(runs[0])) {
    if (std::ranges::find(others, one.step, &FoundCheckpoint::step) != others.end())
      steps.push_back(one.step);
  }
  std::ranges::sort(steps);
  if (!first) return steps;
  const auto after = std::ranges::lower_bound(steps, *first);
  if (after != steps.begin()) out.push_back(*(after - 1));
  if (after != steps.end()) out.push_back(*after);
  return out;
}

std::vector<ValueDifference> compare_sources(const Json& a, const Json& b) {
  std::vector<ValueDifference> out;
  for (const auto& [key, value] : a.items()) {
    if (b.contains(key) && b[key] != value) out.push_back({key, {value.dump(), b[key].dump()}});
  }
  return out;
}

// The first tensor under its name in exported files; of state, "NAME m", the part before the blank is that.
void rename_first(StateDifference& state, const TensorNames& names) {
  if (!state.first) return;
  std::string& name = state.first->name;
  const size_t end = std::min(name.find(' '), name.size());
  name.replace(0, end, names(name.substr(0, end)));
}

CommonCheckpoint compare_checkpoints(const Runs& runs, int64_t step, const TensorNames& names) {
  const auto path = [&](size_t r) { return runs[r] + "/checkpoints/" + checkpoint_name(step); };
  CheckpointReader a(path(0)), b(path(1));
  CommonCheckpoint out{.step = step,
                       .sources = compare_sources(a.manifest().sources, b.manifest().sources),
                       .weights = compare_weights(a, b),
                       .optimizer = {}};
  if (out.weights.equal()) out.optimizer = compare_optimizer(a, b);
  rename_first(out.weights, names);
  if (out.optimizer) rename_first(*out.optimizer, names);
  return out;
}

// The directory of a run that repeats this one.
std::string directory_again(const std::string& run) {
  namespace fs = std::filesystem;
  const auto plain = [](const fs::path& path) { return (path / "").lexically_normal().parent_path(); };
  const fs::path path = plain(run);
  const bool named = !path.filename().empty() && path.filename() != "..";
  return (named ? path : plain(fs::absolute(run))).string() + "_again";
}

// The command that runs a run again in another directory, with a checkpoint at `step`.
std::string command_again(const std::string& run, const std::string& again, int64_t step) {
  CommandLine line{.command = "train",
                   .positional = {run + "/config.toml"},
                   .overrides = {"run.dir=" + again, fmt::format("checkpoint.every={}", step)},
                   .flags = {},
                   .lists = {}};
  const std::string file = run + "/" + kNumericsFile;
  if (!std::filesystem::exists(file)) return typed(line);
  const NumericsPlan numerics = parse_numerics(read_small_file(file, 1 << 16), file);
  if (numerics.ranks == 1) return typed(line);
  if (numerics.ranks != numerics.machine_ranks)
    return fmt::format("mpirun -n {} {}", numerics.ranks, typed(line));
  line.flags[numerics.kernel_set.starts_with("cuda") ? "--gpus" : "--ranks"] = std::to_string(numerics.ranks);
  return typed(line);
}

// Commands that give checkpoints of the first step that differs, or of the last common one; none if the
// checkpoints that are there have answered.
std::vector<std::string> commands_next(const RunDifference& found) {
  const std::optional<int64_t>& first = found.rows.first;
  const bool answered = std::ranges::any_of(found.checkpoints, [&](const CommonCheckpoint& one) {
    return !first || one.step >= *first || !one.equal();
  });
  const int64_t step = found.step_again();
  if (answered || step < 1) return {};
  Runs again = {directory_again(found.runs[0]), directory_again(found.runs[1])};
  if (again[0] == again[1]) again[1] += "_b";
  const CommandLine compare{
      .command = "diff", .positional = {again[0], again[1]}, .overrides = {}, .flags = {}, .lists = {}};
  return {command_again(found.runs[0], again[0], step), command_again(found.runs[1], again[1], step),
          typed(compare)};
}

RunDifference compare_runs(const Runs& runs) {
  RunDifference out{.runs = runs,
                    .status = {read_status(runs[0]), read_status(runs[1])},
                    .settings = compare_settings(runs[0], runs[1]),
                    .rows = compare_rows(runs[0] + "/metrics.jsonl", runs[1] + "/metrics.jsonl"),
                    .checkpoints = {},
                    .next = {}};
  const TensorNames names = exported_names(runs[0]);
  for (const int64_t step : common_steps(runs, out.rows.first)) {
    out.checkpoints.push_back(compare_checkpoints(runs, step, names));
    if (!out.checkpoints.back().equal()) break;  // the first tensor that differs is in it
  }
  out.next = commands_next(out);
  return out;
}

// As JSON.

OrderedJson json_of(const std::vector<ValueDifference>& differences) {
  OrderedJson out = OrderedJson::array();
  for (const ValueDifference& one : differences) out.push_back({{"key", one.key}, {"values", one.values}});
  return out;
}

OrderedJson json_of(const std::optional<double>& number) {
  return number && std::isfinite(*number) ? OrderedJson(*number) : OrderedJson();
}

OrderedJson json_of(const StateDifference& state) {
  OrderedJson first;
  if (state.first)
    first = {{"name", state.first->name},
             {"elements", state.first->elements},
             {"differ", state.first->differ},
             {"largest", json_of(state.first->largest)}};
  return {{"compared", state.compared},
          {"differ", state.differ},
          {"only_in", {state.only_a, state.only_b}},
          {"first", first},
          {"largest", json_of(state.largest)}};
}

OrderedJson json_of(const RunDifference& found) {
  OrderedJson runs = OrderedJson::array(), columns = OrderedJson::array(), checkpoints = OrderedJson::array();
  for (size_t r = 0; r < 2; ++r)
    runs.push_back({{"directory", found.runs[r]},
                    {"state", found.status[r] ? OrderedJson(found.status[r]->state) : OrderedJson()},
                    {"last_step", found.rows.last[r]}});
  for (const ColumnDifference& one : found.rows.columns)
    columns.push_back({{"name", one.name}, {"values", one.values}, {"relative", json_of(one.relative)}});
  for (const CommonCheckpoint& one : found.checkpoints)
    checkpoints.push_back({{"step", one.step},
                           {"sources", json_of(one.sources)},
                           {"weights", json_of(one.weights)},
                           {"optimizer", one.optimizer ? json_of(*one.optimizer) : OrderedJson()}});
  return {{"equal", found.equal()},
          {"runs", runs},
          {"settings", json_of(found.settings.settings)},
          {"settings_without_effect", json_of(found.settings.without_effect)},
          {"recorded", json_of(found.settings.recorded)},
          {"steps", {{"compared", found.rows.compared}, {"differ", found.rows.differ}}},
          {"first_step", found.rows.first ? OrderedJson(*found.rows.first) : OrderedJson()},
          {"columns", columns},
          {"checkpoints", checkpoints},
          {"next", found.next}};
}

// As text.

std::string row(const std::string& name, const std::string& a, const std::string& b,
                const std::string& behind = "") {
  const auto shown = [](const std::string& value) { return value.empty() ? "(none)" : value; };
  return fmt::format("  {:<26}  {} | {}{}\n", name, shown(a), shown(b), behind);
}

std::string text_of(const std::string& title, const std::vector<ValueDifference>& differences) {
  if (differences.empty()) return "";
  std::string out = title + "\n";
  for (const ValueDifference& one : differences) out += row(one.key, one.values[0], one.values[1]);
  return out + "\n";
}

std::string text_of(const RowDifference& rows) {
  if (rows.compared == 0 && !rows.first) return "metrics: the runs have no step in common\n";
  std::string out;
  if (!rows.first) {
    out = fmt::format("metrics: equal in {} steps\n", rows.compared);
  } else {
    out = fmt::format("metrics: the first step that differs is {}; {} of {} steps that both have differ\n",
                      *rows.first, rows.differ, rows.compared);
    for (const ColumnDifference& one : rows.columns)
      out += row(one.name, one.values[0].dump(-1, ' ', false, Json::error_handler_t::replace),
                 one.values[1].dump(-1, ' ', false, Json::error_handler_t::replace),
                 one.relative ? fmt::format("    relative {:.2g}", *one.relative) : "");
  }
  if (rows.last[0] != rows.last[1])
    out += fmt::format("one run is longer: the last steps are {} and {}\n", rows.last[0], rows.last[1]);
  return out;
}

std::string text_of(const StateDifference& state, const std::string& what) {
  std::string out;
  if (state.equal()) return fmt::format("{} equal ({} tensors)", what, state.compared);
  if (state.differ > 0) {
    out = fmt::format("{} of {} tensors of the {} differ", state.differ, state.compared, what);
    if (state.largest) out += fmt::format(", by {:.3g} at most", *state.largest);
    out += fmt::format("; the first is {}, {} of {} elements", state.first->name, state.first->differ,
                       state.first->elements);
    if (state.first->largest) out += fmt::format(", by {:.3g} at most", *state.first->largest);
  }
  if (state.only_a + state.only_b > 0)
    out += fmt::format("{}tensors of the {} that only one run has: {} and {}", out.empty() ? "" : "; ", what,
                       state.only_a, state.only_b);
  return out;
}

std::string text_of(const RunDifference& found) {
  std::string out;
  for (size_t r = 0; r < 2; ++r)
    out += fmt::format("{}  {}  ({})\n", r == 0 ? "a" : "b", found.runs[r],
                       found.status[r] ? found.status[r]->state : "no status");
  out += "\n" + text_of("settings that differ (a | b)", found.settings.settings) +
         text_of("recorded with the runs, and different", found.settings.recorded) +
         text_of("settings that differ and cannot change a result", found.settings.without_effect) +
         text_of(found.rows);
  for (const CommonCheckpoint& one : found.checkpoints) {
    out += fmt::format("checkpoint of step {}: {}", one.step, text_of(one.weights, "weights"));
    if (one.optimizer) out += "; " + text_of(*one.optimizer, "optimizer state");
    out += "\n";
    for (const ValueDifference& source : one.sources)
      out += row(source.key, source.values[0], source.values[1]);
  }
  if (found.checkpoints.empty()) out += "checkpoints: the runs have none of the same step\n";
  if (found.next.empty()) return out;
  out += fmt::format(
      "\nTo see which tensor differs first, run both again up to step {} (Ctrl-C ends a run once it has "
      "printed\nCOMMITTED step {}), and compare them:\n",
      found.step_again(), found.step_again());
  for (const std::string& command : found.next) out += "  " + command + "\n";
  return out;
}

}  // namespace

Exit diff_command(const CommandLine& line) {
  const RunDifference found =
      compare_runs({require_run(line.positional[0]), require_run(line.positional[1])});
  if (line.has("--json")) {
    std::printf("%s\n", json_of(found).dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  } else {
    std::fputs(escape_controls(text_of(found)).c_str(), stdout);
  }
  return found.equal() ? Exit::kDone : Exit::kDiffer;
}

}  // namespace lm
