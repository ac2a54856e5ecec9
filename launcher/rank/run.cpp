#include "launcher/rank/run.h"

#include <cmath>
#include <cstdio>
#include <optional>

#include "base/log.h"
#include "base/trace.h"
#include "config/config_toml.h"
#include "launcher/control.h"
#include "launcher/rank/job.h"
#include "launcher/rank/progress.h"
#include "launcher/rank/run_files.h"
#include "launcher/rank/save_model.h"
#include "train/evaluate.h"
#include "train/trainer.h"

namespace lm {
namespace {

// The first step warms up, and finds every slot empty.
constexpr int64_t kFirstTraced = 2, kLastTraced = 4;

int64_t total_steps(const Config& config, Loader& loader) {
  const int64_t steps =
      config.train.steps ? *config.train.steps : loader.total_steps(config.train.epochs.value_or(1));
  check_schedule(config.optimizer, steps);
  return steps;
}

EvalResult evaluate_and_record(Rank& rank, const std::vector<Batch>& held_out, int64_t step,
                               MetricsFile& metrics) {
  const EvalResult result = evaluate(rank, held_out);
  metrics.write_eval(step, result.loss, result.target_tokens);
  char line[120];
  std::snprintf(line, sizeof line, "held-out loss after step %ld: %.4f (perplexity %.2f, %ld targets)", step,
                result.loss, std::exp(result.loss), result.target_tokens);
  log_line(line);
  return result;
}

// Where a file of the run cannot be written any more, what the steps have reached is saved before the run
// ends.
TrainerResult train_or_save(Trainer& trainer, const TrainerHooks& hooks,
                            const std::function<std::string()>& save) {
  try {
    return trainer.run(hooks);
  } catch (const Error& error) {
    const bool disk = error.code() == Exit::kNoSpace || error.code() == Exit::kIo;
    if (!disk || !trainer.between_steps() || trainer.steps() == 0) throw;
    log_warning(error.text().area, std::string(error.what()) + "; saving the model");
    ErrorText text = error.text();
    text.kept = "the model after step " + std::to_string(trainer.steps()) + ", in " + save();
    throw Error(error.code(), text);
  }
}

// The story of a run.
Exit train(const CommandLine& line, Control& control) {
  const RunFiles files(line.value("--run-dir").value());
  const auto stop_requested = [&] { return control.stop_requests() > 0; };

  // What was asked for, and where every byte of it will live. Nothing large is allocated yet, and what cannot
  // fit ends here.
  const Config config = load_config(line.positional[0], line.overrides);
  std::optional<Trace> trace;
  if (line.has("--trace")) trace.emplace(*line.value("--trace"), kFirstTraced, kLastTraced);
  const std::unique_ptr<Job> job = open_job(config, line, PlanPurpose::kTrain, *line.value("--run-dir"));
  files.begin(*job);
  log_line(print_plan(job->plan));
  ReservedSpace space(files.path("."), model_bytes(*job));

  // Text becomes tokens once; a second start finds them. The first example shows what will be learnt.
  JobData data = open_data(*job, stop_requested);
  log_coloured(sample_view(data.train, false), sample_view(data.train, true));
  log_line(data.loader->length_report());
  const std::vector<Batch> held_out = data.loader->eval_batches();
  const int64_t steps = total_steps(config, *data.loader);

  // From here on every byte has its home: weights, gradients, optimizer state and the arena.
  const std::unique_ptr<Rank> rank = make_rank(*job, true, trace ? &*trace : nullptr);
  load_rank(*job, *rank);
  if (!rank->far().description().empty()) log_line("offload: " + rank->far().description());

  MetricsFile metrics(files.path("metrics.jsonl"));
  if (!held_out.empty()) evaluate_and_record(*rank, held_out, 0, metrics);

  // The loop. A stop request lets the step at hand finish.
  Progress progress(config, steps);
  Trainer trainer(*rank, *data.loader, config,
                  {.total_steps = steps,
                   .sol_seconds =
                       [&](const StepWork& work) {
                         return necessary_flops(job->model.spec, job->model.layout,
                                                job->model.adapter.has_value(), work) /
                                job->peak_flops;
                       }},
                  metrics);
  TrainerHooks hooks;
  hooks.stop_requested = stop_requested;
  hooks.on_step = [&](const StepRow& row) {
    progress.show(row);
    control.publish({.step = row.step, .repeat = row.step, .checkpoint = "", .reason = ""});
    files.running(row.step);
  };
  if (!held_out.empty()) {
    hooks.evaluate = [&](int64_t step) { return evaluate_and_record(*rank, held_out, step, metrics).loss; };
  }
  const TrainerResult result = train_or_save(trainer, hooks, [&] {
    save_model(files, *job, *rank, space, trainer.steps());
    return files.path("model");
  });
  progress.finish(result);

  // The trained model appears in one step, complete or not at all; a stopped run leaves what it has reached.
  // It is worth more than what follows, and comes first.
  if (result.steps > 0) save_model(files, *job, *rank, space, result.steps);
  if (trace) trace->write();  // a run too short to have done so
  if (!held_out.empty() && result.steps > 0) evaluate_and_record(*rank, held_out, result.steps, metrics);
  log_line("peak resident memory " + format_peak(job->plan, result.device_bytes));
  return result.stopped ? Exit::kStopped : Exit::kDone;
}

}  // namespace

Exit run_training(const CommandLine& line) {
  Control control = Control::attach(static_cast<int>(line.integer("--control-fd").value()));
  try {
    return train(line, control);
  } catch (const Error& error) {
    RankRecord last = control.latest();
    last.exit_code = static_cast<int>(error.code());
    control.publish(last);
    throw;
  }
}

}  // namespace lm
