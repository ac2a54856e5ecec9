// State of a command of the worker: configuration, model, adapter, layout, plan. Values; the rank and the
// loader borrow from a Job, which must not move until they are gone.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"
#include "data/prepare.h"
#include "data/python_rows.h"
#include "data/stream_loader.h"
#include "launcher/command_line.h"
#include "launcher/planned_model.h"
#include "launcher/worker/ranks.h"
#include "launcher/worker/token_cache.h"
#include "train/rank.h"
#include "weights/principal_pairs.h"

namespace lm {

struct Job {
  Config config;
  std::string run = {};  // the run's directory; "": none
  Environment environment;
  PlannedModel model;
  Machine machine;
  Plan plan;
  DataShape data = {};  // row lengths that the plan's times are for, once the data is open
  int ranks_on_machine = 1;
  // The exported model's chat template, if it is not the base model's: the data's, known once the data is
  // open.
  std::string chat_template = {};
  std::string date = {};  // the date for chat templates that print one, likewise; "": today's
  double peak_flops = 0;  // measured (CPU) or specified (GPU)
  StreamView stream;
};

// Inputs of its plan. Borrows from the job.
PlanInputs plan_inputs(const Job& job);

// Starts torch on the device that this executable and the command line choose, and makes the plan; for
// training with rates measured now or within a week. Uses `saved`, a checkpoint's numerics, if given, else
// those that `run`, a run's directory ("": none), has recorded. Throws Error(10, 11, 12, 14). With several
// `ranks` (null: one) all plan with rank 0's inputs.
std::unique_ptr<Job> open_job(const Config& config, const CommandLine& line, PlanPurpose purpose,
                              const std::string& run = "",
                              const std::optional<NumericsPlan>& saved = std::nullopt,
                              Ranks* ranks = nullptr);

// The pairs that the job's adapter began with (PiSSA), for a model of type `dtype`. Borrows from the job.
PrincipalPairs principal_pairs(const Job& job, DType dtype);

// Creates a rank for the job; `training` allocates gradients and optimizer state as well.
std::unique_ptr<Rank> make_rank(const Job& job, bool training, Trace* trace = nullptr,
                                Ranks* ranks = nullptr);

// Loads the job's weights into the rank: the base model (or random weights), then the adapter (given or
// fresh). With `trained`, a run's model/ directory or a checkpoint, loads its weights or adapter instead.
void load_rank(const Job& job, Rank& rank, const std::string& trained = "");

// The token files of a run and the loader over them; with data.streaming its rows.
struct JobData {
  std::unique_ptr<TokenCache> cache;
  Prepared train;               // of streamed rows: the first of them
  std::vector<Prepared> evals;  // data.eval; empty: a share of train, or no evaluation data
  std::unique_ptr<DataSource> train_source;
  std::vector<std::unique_ptr<DataSource>> eval_sources;
  std::unique_ptr<Loader> loader;  // of streamed rows: of the evaluation sets alone
  std::unique_ptr<PythonRows> rows;
  std::unique_ptr<StreamLoader> stream;  // unset: the loader trains

  BatchSource& batches() { return stream ? static_cast<BatchSource&>(*stream) : *loader; }
};
// `run`: the run's directory, "": none; written to if there are several `ranks`, or one that trains. Sets
// job.date.
JobData open_data(Job& job, const std::string& run, const std::function<bool()>& stopped = {},
                  Ranks* ranks = nullptr);

// A RUN argument resolved (subject.cpp): a run's directory, its model/ or one of its checkpoints, a model's
// or an adapter's directory. The configuration to open it with, and where its trained weights are ("": the
// base model itself).
struct Subject {
  Config config;
  std::string trained = {};
  bool checkpoint = false;  // `trained` is a checkpoint
  std::string run = {};     // "" unless it is a run's directory
};
// `overrides`: keys of the configuration, "table.key=value".
Subject open_subject(const std::string& path, const std::vector<std::string>& overrides = {});

}  // namespace lm
