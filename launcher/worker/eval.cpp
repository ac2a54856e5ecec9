#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "config/config_toml.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"
#include "launcher/recorded.h"
#include "launcher/worker/job.h"
#include "launcher/worker/scored_answers.h"
#include "launcher/worker/worker_commands.h"
#include "train/evaluate.h"

namespace lm {
namespace {

[[noreturn]] void refuse_without_data(const std::string& what, bool model) {
  throw Error(Exit::kConfig,
              {.area = "CONF-20",
               .what = "there is no evaluation data",
               .place = what,
               .next = model ? "name some: lmlaunch eval " + what + " 'data.eval=[\"file.jsonl\"]'"
                             : "set data.eval = [\"file\"] or data.eval_fraction"});
}

// A line for each row of choices: the log-likelihoods of its endings, and which were chosen.
std::string score_lines(const EvalBatches& set, const ChoiceScores& scores) {
  std::string lines;
  std::span<const double> rest = scores.log_likelihoods;
  for (size_t row = 0; row < set.groups.size(); ++row) {
    const ChoiceGroup& group = set.groups[row];
    const std::span<const double> here = rest.first(group.characters.size());
    rest = rest.subspan(here.size());
    const Chosen chosen = choose(group, here);
    nlohmann::ordered_json line = {{"row", row + 1}};
    if (!set.set.empty()) line["set"] = set.set;
    line["label"] = group.right;
    line["chosen"] = chosen.by_sum;
    line["chosen_norm"] = chosen.by_character;
    line["log_likelihoods"] = std::vector<double>(here.begin(), here.end());
    line["characters"] = group.characters;
    lines += line.dump() + "\n";
  }
  return lines;
}

void refuse_without_choices(const CommandLine& line, const std::vector<EvalBatches>& sets) {
  if (!line.has("--scores")) return;
  if (std::ranges::any_of(sets, [](const EvalBatches& set) { return !set.groups.empty(); })) return;
  throw Error(Exit::kConfig, {.area = "CONF-20",
                              .what = "--scores: no evaluation set has rows of choices",
                              .place = line.positional[0],
                              .next = "name one in data.eval, or leave --scores out"});
}

// Prints the result of a set, and adds it to `json`.
void report(const EvalBatches& set, const EvalResult& result, bool prints, nlohmann::ordered_json& json) {
  const std::string of = set.set.empty() ? "" : "/" + set.set;
  json["eval_loss" + of] = result.loss;
  if (!result.scored) json["perplexity" + of] = std::exp(result.loss);
  json["target_tokens" + of] = result.target_tokens;
  for (const auto& [name, value] : named_scores(result)) json[name + of] = value;
  for (const auto& [name, value] : named_scores(result.answers)) json[name] = value;
  if (!prints) return;
  const std::string set_name = set.set.empty() ? "" : " of " + set.set;
  if (result.scored) {
    std::printf("eval loss%s %s\n", set_name.c_str(), describe_scored(result).c_str());
    return;
  }
  std::printf("eval loss%s %.4f, perplexity %.2f, token accuracy %.4f over %ld target tokens%s\n",
              set_name.c_str(), result.loss, std::exp(result.loss), result.token_accuracy,
              result.target_tokens, result.choices ? describe(*result.choices).c_str() : "");
  if (result.answers.answers > 0) std::printf("answers: %s\n", describe(result.answers).c_str());
}

}  // namespace

Exit eval_command(const CommandLine& line) {
  const std::string& what = line.positional[0];
  const bool file = names_configuration(what);
  Subject subject =
      file ? Subject{.config = load_config(what, line.overrides)} : open_subject(what, line.overrides);
  if (file) settle_model(subject.config, read_environment());
  // A model's directory has no data of its own: only evaluation data is read.
  DataConfig& data_keys = subject.config.data;
  if (data_keys.train.empty() && !data_keys.eval.empty()) data_keys.train = data_keys.eval.all.front().files;
  if (data_keys.train.empty()) refuse_without_data(what, true);
  if (!subject.run.empty() && (line.has("--gpus") || line.has("--ranks")))
    subject.config.run.device = DeviceChoice::kAuto;  // as the CLI chose (start_run.cpp)
  const std::unique_ptr<Job> job = open_job(subject.config, line, PlanPurpose::kEvaluate, subject.run);
  JobData data = open_data(*job, subject.run);
  const std::vector<EvalBatches> eval_sets = data.loader->eval_sets();
  if (eval_sets.empty()) refuse_without_data(what, false);
  refuse_without_choices(line, eval_sets);
  job->chat_template = data.train.chat_template;
  const ScoredAnswers answers(*job);
  const std::unique_ptr<Rank> rank = make_rank(*job, false);
  load_rank(*job, *rank, subject.trained);
  nlohmann::ordered_json json;
  std::string scores;
  for (const EvalBatches& set : eval_sets) {
    EvalResult result = evaluate(*rank, set);
    if (&set == eval_sets.data() && !answers.empty()) result.answers = *answers.score(*rank);
    if (result.choices) scores += score_lines(set, *result.choices);
    report(set, result, !line.has("--json"), json);
  }
  if (line.has("--scores")) atomic_write_file(*line.value("--scores"), scores);
  if (line.has("--json")) std::printf("%s\n", json.dump().c_str());
  return Exit::kDone;
}

}  // namespace lm
