// What a command of the rank's executable works on, opened in one place: configuration, model, adapter,
// layout, plan. Values; the rank and the loader borrow from a Job, which stays where it is until they are
// gone.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"
#include "data/prepare.h"
#include "launcher/command_line.h"
#include "launcher/planned_model.h"
#include "launcher/rank/ranks.h"
#include "launcher/rank/token_cache.h"
#include "train/rank.h"

namespace lm {

struct Job {
  Config config;
  std::string run = {};  // the run's directory; "": none
  Environment environment;
  PlannedModel model;
  Machine machine;
  Plan plan;
  DataShape data = {};  // of the rows that the plan's times are for, once they are open
  int ranks_on_machine = 1;
  // Of the model that leaves, where it is not its base's: the data's, known once they are open.
  std::string chat_template = {};
  std::string date = {};  // what a chat template is told that asks, likewise; "": today's
  double peak_flops = 0;  // measured (CPU) or specified (GPU)
  StreamView stream;
};

// What its plan is made from. Borrows from the job.
PlanInputs plan_inputs(const Job& job);

// Starts torch on the device that this executable and the command line say, and makes the plan; for training
// with rates that were measured, now or within a week. Adopts `saved`, a checkpoint's numerics, where given,
// else those that `run`, a run's directory ("": none), has recorded. Throws Error(10, 11, 12, 14).
// With several `ranks` (null: one) all plan with what the first of them knows.
std::unique_ptr<Job> open_job(const Config& config, const CommandLine& line, PlanPurpose purpose,
                              const std::string& run = "",
                              const std::optional<NumericsPlan>& saved = std::nullopt,
                              Ranks* ranks = nullptr);

// A rank for the job; `training` allocates gradients and optimizer state as well.
std::unique_ptr<Rank> make_rank(const Job& job, bool training, Trace* trace = nullptr,
                                Ranks* ranks = nullptr);

// The job's weights into the rank: the base model (or fresh weights), then the adapter (given or fresh).
// With `trained`, a run's model/ directory or a checkpoint, its weights or adapter are taken instead.
void load_rank(const Job& job, Rank& rank, const std::string& trained = "");

// The token files of a run and the loader over them.
struct JobData {
  std::unique_ptr<TokenCache> cache;
  Prepared train;
  std::vector<Prepared> evals;  // of data.eval; none: held out of train, or nothing is
  std::unique_ptr<DataSource> train_source;
  std::vector<std::unique_ptr<DataSource>> eval_sources;
  std::unique_ptr<Loader> loader;
};
// `run`: the directory of the run that they belong to, "" none; by several `ranks`, or one that trains, it is
// written to. Sets job.date.
JobData open_data(Job& job, const std::string& run, const std::function<bool()>& stopped = {},
                  Ranks* ranks = nullptr);

// A run's directory as RUN arguments name it, its model/ or one of its checkpoints, a model's or an
// adapter's: the configuration to open it with and where its trained weights are ("" = the base model
// itself).
struct Subject {
  Config config;
  std::string trained = {};
  bool checkpoint = false;  // that `trained` is
  std::string run = {};     // "" unless it is a run's directory
};
// `overrides`: keys of the configuration, "table.key=value".
Subject open_subject(const std::string& path, const std::vector<std::string>& overrides = {});

}  // namespace lm
