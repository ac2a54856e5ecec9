// The loop over optimizer steps: next batches, learning rate, the step, its row of metrics, evaluation when
// due, and an orderly stop. Borrows everything; one thread.
#pragma once

#include <functional>
#include <optional>

#include "base/json.h"
#include "data/loader.h"
#include "optim/learning_rate.h"
#include "train/metrics.h"
#include "train/rank.h"

namespace lm {

struct TrainerOptions {
  int64_t total_steps = 0;
  // The share of the speed of light that so much work in so many seconds is; empty: not known.
  std::function<double(const StepWork&, double seconds)> sol_share;
};

// What the launcher hangs into the loop; any may be empty.
struct TrainerHooks {
  std::function<bool()> stop_requested;  // asked between steps
  std::function<void()> before_row;      // a step is computed, and its row not yet written
  std::function<void(const StepRow&)> on_step;
  std::function<double(int64_t step)> evaluate;  // held-out loss; called every eval_every steps
  std::function<void(int64_t step)> sample;      // answers to train.sample_prompts; called then, too
  // A step and what was due after it are done: the place to save. `best`: its evaluation gave the least loss
  // so far.
  std::function<void(bool best)> after_step;
};

struct TrainerResult {
  int64_t steps = 0;     // done
  bool stopped = false;  // on request, before total_steps
  bool early = false;    // the held-out loss has ended it, before total_steps
  double seconds = 0;    // in steps
  int64_t tokens = 0;
  int64_t device_bytes = 0;  // at the peak (metrics.h)
};

// What a resumed run must know besides the rank's state.
struct TrainerState {
  int64_t step = 0, skipped = 0, skipped_in_row = 0;  // steps done, and skipped of them
  int64_t tokens = 0;                                 // seen so far
  double seconds = 0;                                 // in steps so far
  std::optional<double> best_eval;                    // the least held-out loss, and after which step
  int64_t best_step = 0;
  int64_t no_lower = 0;  // evaluations in a row that gave no lower loss, as early stopping counts
  PlateauRate::State plateau;
  LoaderPosition data;

  // After an evaluation: whether its loss is the least so far, which one that is not finite never is. To
  // count as lower it has to be by more than `threshold`.
  bool observe(double held_out_loss, double threshold);
};
// As an object of a checkpoint's manifest, and back. Throws Error(11) for what we have not written.
Json state_json(const TrainerState& state);
TrainerState parse_trainer_state(const Json& json, const std::string& place);

class Trainer {
 public:
  Trainer(Rank& rank, Loader& loader, const Config& config, const TrainerOptions& options,
          MetricsFile& metrics);

  TrainerResult run(const TrainerHooks& hooks);

  int64_t steps() const { return state_.step; }  // done
  // The held-out loss has not fallen for as many evaluations as train.early_stopping_patience allows.
  bool patience_is_over() const {
    const int64_t patience = config_.train.early_stopping_patience;
    return patience > 0 && state_.no_lower >= patience;
  }
  // False while a step is at work: an error that ends it leaves weights of which some are new.
  bool between_steps() const { return between_steps_; }

  // Where the run stands, beside the rank's state (Rank::catalogue).
  TrainerState state() const;
  void restore(const TrainerState& state);

 private:
  StepRow step_once();
  bool evaluation_due() const;
  // Whether the evaluation gave the least loss so far.
  bool evaluate_if_due(const TrainerHooks& hooks);
  void count_skipped(const StepRow& row);
  // What has passed each link since the last row.
  void count_moved(StepRow& row);
  double epoch() const;

  Rank& rank_;
  Loader& loader_;
  const Config& config_;
  TrainerOptions options_;
  MetricsFile& metrics_;
  TrainerState state_;  // but for plateau and data, which their owners know
  bool between_steps_ = true;
  PlateauRate plateau_;
  IoCounters disks_;  // at the last row, as what follows
  double busy_ = 0, waited_ = 0;
  int64_t to_device_ = 0, from_device_ = 0, sent_ = 0, sent_between_ = 0;
  int64_t device_peak_ = 0;
};

}  // namespace lm
