#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "config/config_toml.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"
#include "launcher/rank/job.h"
#include "launcher/rank/rank_commands.h"
#include "launcher/recorded.h"
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
  const std::vector<EvalBatches> held_out = data.loader->eval_sets();
  if (held_out.empty()) refuse_without_data(what, false);
  const std::unique_ptr<Rank> rank = make_rank(*job, false);
  load_rank(*job, *rank, subject.trained);
  nlohmann::ordered_json json;
  for (const EvalBatches& set : held_out) {
    const EvalResult result = evaluate(*rank, set.batches);
    const std::string of = set.set.empty() ? "" : "/" + set.set;
    json["eval_loss" + of] = result.loss;
    json["perplexity" + of] = std::exp(result.loss);
    json["target_tokens" + of] = result.target_tokens;
    if (line.has("--json")) continue;
    std::printf("eval loss%s %.4f, perplexity %.2f over %ld target tokens\n",
                set.set.empty() ? "" : (" of " + set.set).c_str(), result.loss, std::exp(result.loss),
                result.target_tokens);
  }
  if (line.has("--json")) std::printf("%s\n", json.dump().c_str());
  return Exit::kDone;
}

}  // namespace lm
