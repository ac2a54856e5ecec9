// The loop over optimizer steps: next batches, learning rate, the step, its metrics row, evaluation when due,
// and an orderly stop. Where a step can run ahead (TrainStep::runs_ahead) its row is written while the next
// one computes, in the order of steps. Borrows everything; one thread.
#pragma once

#include <functional>
#include <optional>

#include "base/json.h"
#include "data/prefetch.h"
#include "optim/learning_rate.h"
#include "train/loss_scale.h"
#include "train/metrics.h"
#include "train/rank.h"

namespace lm {

struct TrainerOptions {
  int64_t total_steps = 0;
  // The utilization for so much work in so many seconds; empty: unknown.
  std::function<double(const StepWork&, double seconds)> utilization;
};

// Training-loop callbacks; all optional.
struct TrainerHooks {
  std::function<bool()> stop_requested;  // called between steps
  std::function<void()> before_row;      // after a step's compute, before its row is written
  std::function<void(const StepRow&)> on_step;
  std::function<double(int64_t step)> evaluate;  // returns the eval loss; called every eval_every steps
  std::function<void(int64_t step)> sample;      // logs samples for train.sample_prompts; called then, too
  // Called when a step and its due evaluation are done: saves checkpoints. `best`: the evaluation had the
  // lowest loss so far.
  std::function<void(bool best)> after_step;
};

struct TrainerResult {
  int64_t steps = 0;     // done
  bool stopped = false;  // on request, before total_steps
  bool early = false;    // early stopping, before total_steps
  double seconds = 0;    // spent in steps
  int64_t tokens = 0;
  int64_t device_bytes = 0;      // at the peak (metrics.h)
  int64_t host_bytes = 0;        // the most that was resident after a step, as its row has it
  int64_t memory_of_others = 0;  // the most of it (Rank::memory_of_others)
};

// The state that a resumed run needs besides the rank's.
struct TrainerState {
  int64_t step = 0, skipped = 0, skipped_in_row = 0;  // steps done, and how many of them were skipped
  int64_t tokens = 0;                                 // seen so far
  double seconds = 0;                                 // in steps so far
  std::optional<double> best_eval;                    // the lowest eval loss, and its step
  int64_t best_step = 0;
  int64_t no_lower = 0;  // consecutive evaluations without a lower loss, for early stopping
  PlateauRate::State plateau;
  std::optional<LossScale> loss_scale;  // of a model in fp16
  LoaderPosition data;

  // Records an evaluation; returns whether its loss is the lowest so far (false if not finite). For early
  // stopping a loss counts as lower only if the decrease exceeds `threshold`.
  bool observe(double eval_loss, double threshold);
};
// To an object of a checkpoint's manifest, and back. Throws Error(11) for an invalid object.
Json state_json(const TrainerState& state);
TrainerState parse_trainer_state(const Json& json, const std::string& place);

class Trainer {
 public:
  Trainer(Rank& rank, BatchSource& loader, const Config& config, const TrainerOptions& options,
          MetricsFile& metrics);

  TrainerResult run(const TrainerHooks& hooks);

  // Done. On a GPU the last one's results may be unread: settle() reads them, and writes its row.
  int64_t steps() const { return state_.step; }
  int64_t finished_steps() const { return state_.step - (unread_ ? 1 : 0); }
  // Called by hooks, before they save: every step's results are known.
  void settle() {
    if (unread_) finish_step();
  }
  // The eval loss has not decreased for train.early_stopping_patience evaluations.
  bool patience_is_over() const {
    const int64_t patience = config_.train.early_stopping_patience;
    return patience > 0 && state_.no_lower >= patience;
  }
  // False during a step: an error that ends it leaves some weights updated.
  bool between_steps() const { return between_steps_; }

  // The trainer's state, which complements the rank's (Rank::catalogue). All is settled.
  TrainerState state() const;
  void restore(const TrainerState& state);

 private:
  // A step that has been started.
  struct Started {
    StepRow row;  // what is known of it before it ends
    StepWork work;
  };
  // None: a stop request has ended the wait for the step's data.
  std::optional<Started> start_step();
  // The next step's; where there are none the row of the step before is written first. Other ranks would be
  // in the step already, which this one cannot leave together with them: of several, the request is thrown.
  std::optional<ReadyStep> next_data();
  // The results of the step before make its row, which is written and counted.
  void finish_step();
  StepRow read_row(Started step);
  // Whether something needs the results of the step that has just been started: else the next one is started
  // first, and the GPU has work while the host reads them.
  bool needs_results() const;
  bool evaluation_due() const;
  // Returns whether the evaluation had the lowest loss so far.
  bool evaluate_if_due(const TrainerHooks& hooks);
  // Sets the next loss scale, and whether the step was skipped because of its own.
  void scale_loss(StepRow& row);
  void count_skipped(const StepRow& row);
  // Counts the bytes moved over each link since the last row.
  void count_moved(StepRow& row);

  Rank& rank_;
  const Config& config_;
  TrainerOptions options_;
  MetricsFile& metrics_;
  TrainerState state_;  // except plateau and data, which their owners have
  std::optional<Started> unread_;
  const TrainerHooks* hooks_ = nullptr;  // of the run under way, like the next two
  TrainerResult result_;
  double row_began_ = 0;  // when the step before ended, or the first one began
  bool between_steps_ = true;
  PlateauRate plateau_;
  IoCounters disks_;  // at the last row, like the next members
  double busy_ = 0, waited_ = 0;
  int64_t to_device_ = 0, from_device_ = 0, sent_ = 0, sent_between_ = 0;
  int64_t device_peak_ = 0;
  Prefetch data_;  // the last: its thread ends before the others go
};

}  // namespace lm
