#include "data/score_command.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "config/config_names.h"

namespace lm {
namespace {

constexpr size_t kMostScores = 64, kMostName = 64;
constexpr int kMostLines = 20;  // of its standard error, in the log
constexpr JsonLimits kOutput{.bytes = 64 << 10, .depth = 2};

std::string lines_of(std::span<const ScoredAnswer> answers) {
  std::string out;
  for (const ScoredAnswer& one : answers) {
    const nlohmann::ordered_json line = {
        {"prompt", one.prompt}, {"answer", one.answer}, {"reference", one.reference}};
    out += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return out;
}

// The name becomes part of keys of metrics.jsonl and of tags.
bool names_a_score(const std::string& name) {
  const auto allowed = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= kMostName && std::ranges::all_of(name, allowed);
}

bool is_ours(const std::string& name) {
  return std::ranges::any_of(EnumNames<AnswerMetric>::kAll,
                             [&](const auto& metric) { return metric.name == name; });
}

// "" if it may be recorded.
std::string fault_of(const std::string& name, const Json& value) {
  const std::string quoted = "\"" + escape_controls(name.substr(0, kMostName)) + "\"";
  if (!names_a_score(name))
    return fmt::format("the name {} is not 1 to {} letters, digits, \"_\" and \"-\"", quoted, kMostName);
  if (is_ours(name)) return fmt::format("the name {} is that of a metric of ours", quoted);
  if (!value.is_number() || !std::isfinite(value.get<double>())) return quoted + " is no finite number";
  return "";
}

std::string fault_of(const ProgramResult& result, int64_t seconds) {
  if (result.error != 0) return std::string("it cannot be started: ") + std::strerror(result.error);
  if (result.stopped) return fmt::format("it was killed after {} s (eval.generate.command_seconds)", seconds);
  if (result.status < 0) return "it was killed, because it printed too much";
  if (WIFSIGNALED(result.status)) return fmt::format("it ended with signal {}", WTERMSIG(result.status));
  if (WEXITSTATUS(result.status) != 0)
    return fmt::format("it ended with status {}", WEXITSTATUS(result.status));
  return "";
}

}  // namespace

CommandScores parse_scores(const std::string& output) {
  Json printed;
  try {
    printed = parse_json(output, "its output", kOutput);
  } catch (const Error& error) {
    return {.failure = "its output is not a number or a JSON object of numbers: " + error.text().what};
  }
  if (printed.is_number()) printed = Json{{"command", printed}};
  if (!printed.is_object() || printed.empty() || printed.size() > kMostScores)
    return {.failure =
                fmt::format("its output is not a number or a JSON object of 1 to {} numbers", kMostScores)};
  CommandScores out;
  for (const auto& [name, value] : printed.items()) {
    const std::string fault = fault_of(name, value);
    if (!fault.empty()) return {.failure = "its output: " + fault};
    out.scores.emplace_back(name, value.get<double>());
  }
  return out;
}

CommandScores run_score_command(const std::vector<std::string>& argv, int64_t seconds,
                                std::span<const ScoredAnswer> answers) {
  const double end = monotonic_seconds() + static_cast<double>(seconds);
  int lines = 0;
  const ProgramResult result = run_program(
      {.argv = argv}, lines_of(answers),
      [&](const std::string& line) {
        if (lines++ < kMostLines) log_line("eval.generate.command: " + escape_controls(line.substr(0, 1000)));
      },
      [&] { return monotonic_seconds() > end; });
  const std::string fault = fault_of(result, seconds);
  return fault.empty() ? parse_scores(result.output) : CommandScores{.failure = fault};
}

}  // namespace lm
