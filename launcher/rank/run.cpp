#include "launcher/rank/run.h"

#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "config/config_toml.h"
#include "launcher/control.h"
#include "launcher/rank/checkpoints.h"
#include "launcher/rank/job.h"
#include "launcher/rank/progress.h"
#include "launcher/rank/run_files.h"
#include "launcher/rank/save_model.h"
#include "launcher/rank/stop_request.h"
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
TrainerResult train_or_save(Trainer& trainer, const std::function<TrainerResult()>& train,
                            const std::function<std::string()>& save) {
  try {
    return train();
  } catch (const Error& error) {
    const bool disk = error.code() == Exit::kNoSpace || error.code() == Exit::kIo;
    if (!disk || !trainer.between_steps() || trainer.steps() == 0) throw;
    log_warning(error.text().area, std::string(error.what()) + "; saving the model");
    ErrorText text = error.text();
    text.kept = "the model after step " + std::to_string(trainer.steps()) + ", in " + save();
    throw Error(error.code(), text);
  }
}

void show_data(const JobData& data) {
  log_coloured(sample_view(data.train, false), sample_view(data.train, true));
  log_line(data.loader->length_report());
}

// Bytes that were damaged on a disk, or cannot be read, end a step and not the run, where there is a
// checkpoint to go back to: all state is written anew from it. Damage is also met between steps, by a save or
// an evaluation. The same disk may fail again, so not for ever.
TrainerResult train_or_go_back(const Job& job, Rank& rank, Trainer& trainer, const TrainerHooks& hooks,
                               MetricsFile& metrics, Checkpoints& checkpoints) {
  constexpr int kMost = 3;  // without a checkpoint in between
  int64_t last = -1;
  for (int times = 0;; ++times) {
    try {
      return trainer.run(hooks);
    } catch (const Error& error) {
      const int64_t saved = checkpoints.newest_step();
      if (std::exchange(last, saved) != saved) times = 0;
      const bool of_state = !trainer.between_steps() || error.code() == Exit::kIntegrity;
      if (!of_state || saved == 0 || times >= kMost || !rank.can_reset(error)) throw;
      log_warning(error.text().area, std::string(error.what()) + "; going back to " + checkpoints.newest());
      rank.reset();
      if (job.model.adapter) load_rank(job, rank);  // the frozen base may have lain on that disk, too
      metrics.keep(checkpoints.go_back(rank, trainer));
    }
  }
}

// Seconds that a step's work takes at least.
double necessary_seconds(const Job& job, const StepWork& work) {
  return necessary_flops(job.model.spec, job.model.layout, job.model.adapter.has_value(), work) /
         job.peak_flops;
}

// A stopped run leaves what it goes on from.
void leave(const std::string& config_path, const StopRequest& stop, Rank& rank, const Trainer& trainer,
           int64_t steps, MetricsFile& metrics, Checkpoints& checkpoints) {
  if (trainer.steps() > 0 && stop.time_to_save()) checkpoints.save(rank, trainer, metrics, true);
  log_line("stopped after step " + std::to_string(trainer.steps()) + " of " + std::to_string(steps) +
           "; to go on: lmlaunch " + config_path);
}

// What the newest checkpoint was computed with.
std::optional<NumericsPlan> saved_numerics(const std::vector<FoundCheckpoint>& saved) {
  if (saved.empty()) return std::nullopt;
  return parse_numerics(saved.front().manifest->numerics.dump(), saved.front().path);
}

// The story of a run.
Exit train(const CommandLine& line, Control& control) {
  const std::string directory = line.value("--run-dir").value();
  const RunFiles files(directory);

  // What was asked for, what there is to go on from, and where every byte of it will live. Nothing large is
  // allocated yet, and what cannot fit ends here.
  const Config config = load_config(line.positional[0], line.overrides);
  StopRequest stop(control, config.run, directory);
  std::optional<Trace> trace;
  if (line.has("--trace")) trace.emplace(*line.value("--trace"), kFirstTraced, kLastTraced);
  const std::vector<FoundCheckpoint> saved = resumable_checkpoints(config, directory);
  const std::unique_ptr<Job> job =
      open_job(config, line, PlanPurpose::kTrain, directory, saved_numerics(saved));
  files.begin(*job);
  log_line(print_plan(job->plan));
  ReservedSpace space(files.path("."), model_bytes(*job));

  // Text becomes tokens once; a second start finds them. The first example shows what will be learnt.
  JobData data = open_data(*job, [&] { return control.stop_requests() > 0; });
  show_data(data);
  const std::vector<Batch> held_out = data.loader->eval_batches();
  const int64_t steps = total_steps(config, *data.loader);

  // From here on every byte has its home: weights, gradients, optimizer state and the arena.
  const std::unique_ptr<Rank> rank = make_rank(*job, true, trace ? &*trace : nullptr);
  if (!rank->off_device().description().empty()) log_line("offload: " + rank->off_device().description());
  MetricsFile metrics(files.path("metrics.jsonl"));
  Trainer trainer(*rank, *data.loader, config,
                  {.total_steps = steps,
                   .sol_seconds = [&](const StepWork& work) { return necessary_seconds(*job, work); }},
                  metrics);

  // The run begins, or goes on from the newest checkpoint that is whole.
  Checkpoints checkpoints(*job, directory, static_cast<int>(line.integer("--lock-fd").value_or(-1)));
  if (saved.empty() || job->model.adapter) load_rank(*job, *rank);
  metrics.keep(saved.empty() ? 0 : checkpoints.restore(saved, *rank, trainer));
  if (!held_out.empty() && saved.empty()) evaluate_and_record(*rank, held_out, 0, metrics);

  // The loop. Whoever asks for a stop lets the step at hand finish.
  Progress progress(config, steps);
  const auto publish = [&] {
    control.publish({.step = trainer.steps(),
                     .repeat = trainer.steps() - checkpoints.newest_step(),
                     .checkpoint = checkpoints.newest(),
                     .reason = stop.reason()});
  };
  TrainerHooks hooks;
  hooks.stop_requested = [&] { return stop.requested(); };
  hooks.on_step = [&](const StepRow& row) {
    stop.expect(row.step_ms / 1e3, checkpoints.expected_seconds());
    progress.show(row);
    publish();
    files.running(row.step);
  };
  hooks.after_step = [&](bool best) {
    if (trainer.steps() < steps && checkpoints.due(trainer, best)) checkpoints.save(*rank, trainer, metrics);
    publish();
  };
  if (!held_out.empty()) {
    hooks.evaluate = [&](int64_t step) { return evaluate_and_record(*rank, held_out, step, metrics).loss; };
  }
  const auto train = [&] { return train_or_go_back(*job, *rank, trainer, hooks, metrics, checkpoints); };
  const TrainerResult result = train_or_save(trainer, train, [&] {
    save_model(files, *job, *rank, space, trainer.steps());
    return files.path("model");
  });
  progress.finish(result);
  if (trace) trace->write();  // a run too short to have done so

  if (result.stopped) {
    leave(line.positional[0], stop, *rank, trainer, steps, metrics, checkpoints);
    publish();
    return Exit::kStopped;
  }
  // The trained model appears in one step, complete or not at all. It is worth more than what follows.
  save_model(files, *job, *rank, space, result.steps);
  if (!held_out.empty()) evaluate_and_record(*rank, held_out, result.steps, metrics);
  log_line("peak resident memory " + format_peak(job->plan, result.device_bytes));
  return Exit::kDone;
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
