#include "launcher/worker/run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <optional>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "config/config_names.h"
#include "config/config_toml.h"
#include "data/sample_view.h"
#include "kernels/library_error.h"
#include "launcher/cached_data.h"
#include "launcher/control.h"
#include "launcher/environment.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/model_place.h"
#include "launcher/status.h"
#include "launcher/worker/checkpoints.h"
#include "launcher/worker/job.h"
#include "launcher/worker/progress.h"
#include "launcher/worker/ranks.h"
#include "launcher/worker/run_export.h"
#include "launcher/worker/run_files.h"
#include "launcher/worker/save_model.h"
#include "launcher/worker/scored_answers.h"
#include "launcher/worker/stop_request.h"
#include "launcher/worker/utilization.h"
#include "optim/learning_rate.h"
#include "train/evaluate.h"
#include "train/trainer.h"
#include "train/watchdog.h"

namespace lm {
namespace {

// Step 1 is not traced: it warms up, and every slot is still empty.
constexpr int64_t kFirstTraced = 2, kLastTraced = 4;

int64_t total_steps(const Config& config, Loader& loader) {
  const int64_t steps =
      config.train.steps ? *config.train.steps : loader.total_steps(config.train.epochs.value_or(1));
  check_schedule(config.optimizer, steps);
  return steps;
}

// " of NAME", where sets have names.
std::string of_set(const std::string& set) {
  return set.empty() ? "" : " of " + set;
}

void record_evaluation(const EvalResult& result, const std::string& set, int64_t step, MetricsFile& metrics) {
  metrics.write_eval(step, result, set);
  const std::string numbers =
      result.scored
          ? describe_scored(result)
          : fmt::format("{:.4f} (perplexity {:.2f}, {} targets){}", result.loss, std::exp(result.loss),
                        result.target_tokens, result.choices ? describe(*result.choices) : "");
  log_fields(fmt::format("eval loss{} after step {}: {}", of_set(set), step, numbers),
             {{"step", step}, {"eval_loss", result.loss}, {"set", set}});
  if (result.answers.answers > 0)
    log_line(fmt::format("answers after step {}: {}", step, describe(result.answers)));
}

// Evaluation loss, scored answers to eval.generate.data, and answers to train.sample_prompts.
struct Evaluator {
  Rank& rank;
  const std::vector<EvalBatches>& eval_sets;
  const Asked& asked;
  MetricsFile& metrics;
  RunExport& exported;

  // Returns the loss of the first set, which decides. Records all sets, or none if a stop was requested.
  std::optional<double> evaluate_unless_stopped(int64_t step, const std::function<bool()>& stopped) const {
    std::vector<EvalResult> results;
    for (const EvalBatches& set : eval_sets) {
      const auto result = evaluate_unless(rank, set, stopped);
      if (!result) return std::nullopt;
      results.push_back(*result);
    }
    if (!results.empty() && !asked.answers.empty()) {
      const auto answers = asked.answers.score(rank, stopped);
      if (!answers) return std::nullopt;
      results.front().answers = *answers;
    }
    for (size_t i = 0; i < results.size(); ++i) {
      record_evaluation(results[i], eval_sets[i].set, step, metrics);
      exported.evaluated(eval_sets[i].set, results[i].loss);
    }
    return results.empty() ? std::nullopt : std::optional(results.front().loss);
  }
  double evaluate_at(int64_t step) const {
    return *evaluate_unless_stopped(step, [] { return false; });
  }
  void at(int64_t step) const {
    if (!eval_sets.empty()) evaluate_at(step);
    asked.samples.answer(rank, step, metrics);
  }
  // Before the first step. A stop request interrupts it, because the next start repeats it.
  void at_start(const std::function<bool()>& stopped) const {
    evaluate_unless_stopped(0, stopped);
    asked.samples.answer(rank, 0, metrics, stopped);
  }
  // This must outlive the hooks.
  void set(TrainerHooks& hooks) const {
    if (!eval_sets.empty()) hooks.evaluate = [this](int64_t step) { return evaluate_at(step); };
    if (!asked.samples.empty())
      hooks.sample = [this](int64_t step) { asked.samples.answer(rank, step, metrics); };
  }
};

// If a file of the run can no longer be written, saves the model before the run ends. Only with one rank:
// several would have to save together.
TrainerResult train_or_save(int ranks, Trainer& trainer, const std::function<TrainerResult()>& train,
                            const std::function<std::string()>& save) {
  try {
    return train();
  } catch (const Error& error) {
    const bool disk = error.code() == Exit::kNoSpace || error.code() == Exit::kIo;
    if (!disk || !trainer.between_steps() || trainer.steps() == 0 || ranks > 1) throw;
    log_warning(error.text().area, std::string(error.what()) + "; saving the model");
    ErrorText text = error.text();
    text.kept = fmt::format("the model after step {}, in {}", trainer.steps(), save());
    throw Error(error.code(), text);
  }
}

// Estimates the step time again, with the data's sequence lengths and at most the sequences of an epoch.
void plan_for_rows(const JobData& data, RunFiles& files, const Ranks& ranks, Job& job) {
  job.data = data.stream ? data_shape(data.train, job.config) : data_shape(*data.loader);
  estimate_again(plan_inputs(job), share_of_machine(job.machine, job.ranks_on_machine), job.plan);
  files.write_plan(job);
  if (data.stream) return;  // the sequences of an epoch are not known
  const int64_t sequences = job.data.sequences, wanted = job.config.train.global_batch;
  if (sequences >= wanted || !ranks.leads()) return;
  log_warning("DATA-24",
              fmt::format("train.global_batch = {} is more than the {} sequences of an epoch: each "
                          "step is a whole epoch of {}, and takes {:.3g} s by the plan; "
                          "lower train.global_batch for more steps",
                          wanted, sequences, sequences, job.plan.step_seconds));
}

// Log a sample of the training data, and write a chat template if the base has none.
void take_data(const JobData& data, RunFiles& files, const Ranks& ranks, Job& job) {
  job.chat_template = data.train.chat_template;
  files.keep_template(job);
  const SampleLength length{job.config.data.max_length - job.model.virtual_tokens(),
                            job.config.data.too_long};
  log_coloured(sample_view(data.train, false, length), sample_view(data.train, true, length));
  const std::string lengths = data.loader->length_report();
  if (!lengths.empty()) log_line(lengths);
  plan_for_rows(data, files, ranks, job);
  log_line(step_line(job.plan));
}

// The learning rate of the step after `done` ones of `steps`.
double rate_after(const Config& config, int64_t done, int64_t steps) {
  return config.optimizer.lr * schedule_factor(config.optimizer, done, steps);
}

// Logs what the schedule makes of it if a run resumes with another number of steps than it recorded.
void tell_longer(const std::string& recorded, const Config& config, int64_t steps, const Trainer& trainer,
                 Loader& loader) {
  const Config before = load_config(recorded);
  const int64_t planned = total_steps(before, loader), next = trainer.steps() + 1;
  if (planned == steps) return;
  log_line(
      fmt::format("{} steps instead of {}: optimizer.schedule = \"{}\" now spans {} steps, and step {} "
                  "has a learning "
                  "rate of {:.3g}; of the {}, the last had {:.3g}",
                  steps, planned, name_of(config.optimizer.schedule), steps, next,
                  rate_after(config, next - 1, steps), planned, rate_after(before, planned - 1, planned)));
  if (next <= planned)
    log_line(fmt::format("steps {} to {} are repeated: no checkpoint has them", next, planned));
}

// Creates the rank and logs its offload configuration.
std::unique_ptr<Rank> open_rank(const Job& job, std::optional<Trace>& trace, Ranks& ranks) {
  std::unique_ptr<Rank> rank = make_rank(job, true, trace ? &*trace : nullptr, &ranks);
  const std::string how = rank->off_device().description();
  if (!how.empty()) log_line("offload: " + how);
  // A run without offloading writes its checkpoints with the same I/O engine.
  const std::string refusal = job.plan.placement.on_disk() || !ranks.leads() ? "" : ring_refusal(job.config);
  if (!refusal.empty()) log_note("IO-18", refusal + ": I/O threads write the checkpoints");
  return rank;
}

// If bytes on a disk are damaged or unreadable, restores all state from the newest checkpoint instead of
// ending the run. A save or an evaluation may find the damage between steps, too. At most kMost times,
// because the disk may fail again.
TrainerResult train_or_go_back(const Job& job, Rank& rank, Trainer& trainer, const TrainerHooks& hooks,
                               MetricsFile& metrics, Checkpoints& checkpoints) {
  constexpr int kMost = 3;  // without a new checkpoint in between
  int64_t last = -1;
  for (int times = 0;; ++times) {
    try {
      return trainer.run(hooks);
    } catch (const Error& error) {
      checkpoints.give_up();
      const int64_t saved = checkpoints.newest_step();
      if (std::exchange(last, saved) != saved) times = 0;
      const bool of_state = !trainer.between_steps() || error.code() == Exit::kIntegrity;
      if (job.plan.numerics.ranks > 1) throw;  // the others wait in the middle of a step
      if (!of_state || saved == 0 || times >= kMost || !rank.can_reset(error)) throw;
      log_warning(error.text().area, std::string(error.what()) + "; restoring from " + checkpoints.newest());
      rank.reset();
      // Frozen weights may be on that disk, too.
      if (job.model.layout.frozen_elements > 0) load_rank(job, rank);
      metrics.keep(checkpoints.go_back(rank, trainer));
    }
  }
}

// The parts of a run that make its checkpoints.
struct Saving {
  Rank& rank;
  Trainer& trainer;
  MetricsFile& metrics;
  Checkpoints& checkpoints;
  const StopRequest& stop;

  void save() const { checkpoints.save(rank, trainer, metrics); }
};

// Finishes the previous asynchronous save, and starts the next one if it is due. No save is pending after the
// last step.
void save_beside(const Saving& run, int64_t steps, bool best) {
  run.checkpoints.poll();
  if (run.trainer.steps() == steps) return run.checkpoints.complete();
  if (!run.checkpoints.due(run.trainer, best)) return;
  run.trainer.settle();
  run.checkpoints.begin(run.rank, run.trainer, run.metrics);
}

// Ends a run that was asked to stop: saves a checkpoint to resume from.
Exit leave(const CommandLine& line, const Saving& run, int64_t steps) {
  if (run.trainer.steps() > 0 && run.stop.time_to_save()) run.save();
  log_line(
      fmt::format("stopped after step {} of {}; to resume: {}", run.trainer.steps(), steps, typed(line)));
  return Exit::kStopped;
}

// Logs why early stopping ended the run, and which step's weights are the result. Returns the checkpoint that
// they are taken from; "": they are the last step's.
std::string end_early(const Config& config, Rank& rank, const Trainer& trainer, Checkpoints& checkpoints) {
  const TrainerState state = trainer.state();
  const int64_t evaluations = state.no_lower;
  const std::vector<EvalSet>& sets = config.data.eval.all;
  log_line(fmt::format(
      "stopped early after step {}: {} evaluation{} in a row gave no lower eval loss{} than {:.4f}, of "
      "step {}",
      state.step, evaluations, evaluations == 1 ? "" : "s", of_set(sets.empty() ? "" : sets.front().name),
      state.best_eval.value_or(0), state.best_step));
  const std::string best = checkpoints.take_best(rank, trainer);
  log_line(!best.empty()
               ? fmt::format("the result has the weights of step {}, the best: {}", state.best_step, best)
           : config.checkpoint.keep_best
               ? "the result has the last step's weights: there is no checkpoint of the best step"
               : "the result has the last step's weights; with checkpoint.keep_best = true it would have the "
                 "best ones");
  return best;
}

// Returns the checkpoint that a sharded model is written from. `early`: early stopping has ended the run.
std::string result_source(const Job& job, bool early, const Saving& run) {
  if (run.stop.time_to_save()) run.checkpoints.finish(run.rank, run.trainer, run.metrics);
  const std::string best = early ? end_early(job.config, run.rank, run.trainer, run.checkpoints) : "";
  if (!best.empty()) return best;
  if (trains_in_shards(job)) run.save();
  return run.checkpoints.newest();
}

// Progress records for the CLI process that supervises this rank, if it has one.
struct CliNews {
  Ranks& ranks;
  Control& control;
  const Trainer& trainer;
  const Checkpoints& checkpoints;
  const StopRequest& stop;

  void publish() const {
    const int64_t step = trainer.finished_steps(), repeat = step - checkpoints.newest_step();
    if (ranks.own_cli()) control.publish({step, repeat, checkpoints.newest(), stop.reason()});
  }
  // If the CLI process is killed from here on, the run's final status does not change.
  Exit end(Exit code) const {
    checkpoints.wait_for_mirror();
    publish();
    if (ranks.own_cli()) control.publish_end(static_cast<int>(code));
    return code;
  }
};

// File descriptor of the run directory's lock; -1: the CLI process has none.
int lock_of(const CommandLine& line) {
  return static_cast<int>(line.integer("--lock-fd").value_or(-1));
}

// Rank 0 deletes what interrupted saves have left before the others look.
std::vector<FoundCheckpoint> find_saved(Ranks& ranks, const Config& config, const std::string& directory) {
  std::vector<FoundCheckpoint> saved;
  ranks.in_turn("checkpoints", [&] { saved = resumable_checkpoints(config, directory); });
  return saved;
}

// Numerics of the newest checkpoint.
std::optional<NumericsPlan> saved_numerics(const std::vector<FoundCheckpoint>& saved) {
  if (saved.empty()) return std::nullopt;
  return parse_numerics(saved.front().manifest->numerics.dump(), saved.front().path);
}

// Reports the error to the user, the other ranks and the CLI process.
Exit end_with(const Error& error, Ranks& ranks, Control& control) {
  // Print first: peers exit as soon as they learn of the error, and this process may be killed. The end of a
  // peer is not printed on the console: that peer, or the CLI process, reports the cause.
  if (ranks.leads() && error.text().area == "PEER-08") {
    log_file_line(error.what());
  } else {
    log_error(error);
  }
  ranks.tell(error);
  if (ranks.own_cli()) control.publish_end(static_cast<int>(error.code()));
  return error.code();
}

// If several ranks' GPUs hang in the same collective, only one reports it.
[[noreturn]] void give_up(const Error& error, Ranks& ranks, Control& control) {
  ErrorText follows = error.text();
  follows.area = "PEER-08";
  const bool speaks = ranks.first_to_give_up();
  _exit(static_cast<int>(end_with(speaks ? error : Error(Exit::kPeerLost, follows), ranks, control)));
}

// With several ranks, a watchdog, because the others would wait long for this one; null for one rank. It ends
// the process, as the compute thread cannot. The hooks must not be used after it.
std::unique_ptr<Watchdog> watch_over(Rank& rank, const Plan& plan, Ranks& ranks, Control& control,
                                     TrainerHooks& hooks) {
  if (ranks.count() == 1) return nullptr;
  // An unresponsive disk times out after the same time, and that error knows which disk it is.
  const double later = plan.placement.on_disk() ? 1.25 : 1;
  auto watchdog = std::make_unique<Watchdog>(
      WatchdogSetup{.progress_counter = rank.progress_counter(),
                    .group = rank.group(),
                    .gpus = &rank.device_group() == &rank.group() ? nullptr : &rank.device_group(),
                    .least = later * silence_seconds().value_or(Watchdog::kLeast),
                    .step_seconds = plan.step_seconds,
                    .host = host_name(),
                    .name = [&rank](const Operation& operation) { return rank.step().name(operation); },
                    .moved_bytes = disk_bytes_moved,
                    .give_up = [&](const Error& error) { give_up(error, ranks, control); }});
  hooks.on_step = [&learns = *watchdog, inner = hooks.on_step](const StepRow& row) {
    learns.step_done(row.step_ms / 1e3);
    inner(row);
  };
  return watchdog;
}

// Caches the measured rate for later runs; writes the trace of a run that was too short to write it.
void finish_loop(const TrainerResult& result, const Ranks& ranks, Progress& progress,
                 const Utilization& limit, std::optional<Trace>& trace) {
  progress.finish(result);
  if (ranks.leads()) limit.keep();
  if (trace) trace->write();
}

// The run's configuration, with its model's directory. log.format applies from here on.
Config read_config(const CommandLine& line, Ranks& ranks) {
  Config config = load_config(line.positional[0], line.overrides);
  use_log_format(config.log, ranks.group().rank());
  settle_model(config, read_environment());
  return config;
}

// A training run from its configuration to the trained model.
Exit train(const CommandLine& line, Control& control, Ranks& ranks) {
  const std::string directory = line.value("--run-dir").value();
  RunFiles files(directory, ranks.leads(), asked_ranks(line), ranks.count());

  // Configuration, checkpoints to resume from, and the plan. Nothing large is allocated yet, and a run that
  // does not fit ends here.
  const Config config = read_config(line, ranks);
  StopRequest stop(control, config.run, directory);
  std::optional<Trace> trace;
  if (line.has("--trace")) trace.emplace(*line.value("--trace"), kFirstTraced, kLastTraced);
  const std::vector<FoundCheckpoint> saved = find_saved(ranks, config, directory);
  const auto job = open_job(config, line, PlanPurpose::kTrain, directory, saved_numerics(saved), &ranks);
  files.begin(*job, line.positional[0], saved.empty());
  log_line(print_plan(job->plan));
  ReservedSpace space(files.path("."), ranks.leads() ? model_bytes(*job) : 0);

  // Text is tokenized once; a second start finds the tokens. The first example is logged.
  JobData data = open_data(
      *job, directory, [&] { return control.stop_requests() > 0; }, &ranks);
  take_data(data, files, ranks, *job);
  const std::vector<EvalBatches> eval_sets = data.loader->eval_sets();
  const Asked asked(*job);
  const int64_t steps = total_steps(config, *data.loader);

  // Allocates weights, gradients, optimizer state and the arena, each in its tier.
  const std::unique_ptr<Rank> rank = open_rank(*job, trace, ranks);
  const std::unique_ptr<EventFile> events = files.events(config.log);
  MetricsFile metrics(ranks.leads() ? files.path("metrics.jsonl") : "", events.get());
  Utilization limit(*job);
  RunExport exported({config.log, directory, job->plan, rank->progress_counter(), steps, ranks.leads()});
  Trainer trainer(*rank, data.batches(), config, {.total_steps = steps, .utilization = std::ref(limit)},
                  metrics);

  // The run starts, or resumes from the newest valid checkpoint.
  Checkpoints checkpoints(*job, directory, lock_of(line), ranks.group());
  if (saved.empty() || job->model.layout.frozen_elements > 0) load_rank(*job, *rank);
  metrics.keep(saved.empty() ? 0 : checkpoints.restore(saved, *rank, trainer));
  const Evaluator evaluator{*rank, eval_sets, asked, metrics, exported};
  const auto stopped = [&] { return ranks.any("stop", stop.requested()); };
  if (saved.empty()) evaluator.at_start(stopped);
  if (ranks.leads()) tell_longer(files.path("config.toml"), config, steps, trainer, *data.loader);

  // The training loop. A stop request lets the current step finish.
  Progress progress(config, job->plan, steps, !eval_sets.empty());
  progress.begin(job->stream.device == DeviceType::kCuda);
  const CliNews cli{ranks, control, trainer, checkpoints, stop};
  const Saving saving{*rank, trainer, metrics, checkpoints, stop};
  TrainerHooks hooks;  // all ranks leave after the same step: they agree on it
  hooks.stop_requested = stopped;
  hooks.before_row = [&] { checkpoints.settle(); };
  hooks.on_step = [&](const StepRow& row) {
    stop.expect(row.step_ms / 1e3, checkpoints.expected_seconds());
    progress.show(row, checkpoints.seconds_since_save());
    exported.step(row, checkpoints.newest_step());
    cli.publish();
    files.running(row.step);
  };
  hooks.after_step = [&](bool best) {
    save_beside(saving, steps, best);
    cli.publish();
  };
  evaluator.set(hooks);
  const auto train = [&] {
    const auto watchdog = watch_over(*rank, job->plan, ranks, control, hooks);
    return train_or_go_back(*job, *rank, trainer, hooks, metrics, checkpoints);
  };
  const TrainerResult result = train_or_save(ranks.count(), trainer, train, [&] {
    save_model(files, *job, *rank, space, trainer.steps());
    return files.path("model");
  });
  finish_loop(result, ranks, progress, limit, trace);
  if (result.stopped) return cli.end(leave(line, saving, steps));
  // The trained model appears atomically. It comes first, because it is worth more than what follows.
  const std::string source = result_source(*job, result.early, saving);
  checkpoints.free_buffers();  // what writes the model needs memory of its own
  save_model(files, *job, *rank, space, result.steps, source);
  if (!result.early) evaluator.at(result.steps);  // early stopping has just evaluated
  show_result(job->plan, job->model.adapter.has_value(), result, directory);
  return cli.end(Exit::kDone);
}

}  // namespace

Exit run_training(const CommandLine& line) {
  Control control = Control::attach(static_cast<int>(line.integer("--control-fd").value()));
  // The ranks of the run; usually this process alone.
  Ranks ranks(line, [&control](const Error& error, Ranks& all) {
    _exit(static_cast<int>(end_with(error, all, control)));
  });
  try {
    const Exit end = train(line, control, ranks);
    ranks.leave();
    return end;
  } catch (const Error& error) {
    return end_with(error, ranks, control);
  } catch (const std::exception& error) {
    return end_with(library_error(error), ranks, control);
  }
}

}  // namespace lm
