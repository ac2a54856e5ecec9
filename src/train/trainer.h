// The loop over optimizer steps: next batches, learning rate, the step, its row of metrics, evaluation when
// due, and an orderly stop. Borrows everything; one thread.
#pragma once

#include <functional>
#include <optional>

#include "data/loader.h"
#include "optim/learning_rate.h"
#include "train/metrics.h"
#include "train/rank.h"

namespace lm {

struct TrainerOptions {
  int64_t total_steps = 0;
  std::function<double(const StepWork&)> sol_seconds;  // at the speed of light; empty: not known
};

// What the launcher hangs into the loop; any may be empty.
struct TrainerHooks {
  std::function<bool()> stop_requested;  // asked between steps
  std::function<void(const StepRow&)> on_step;
  std::function<double(int64_t step)> evaluate;  // held-out loss; called every eval_every steps
};

struct TrainerResult {
  int64_t steps = 0;     // done
  bool stopped = false;  // on request, before total_steps
  double seconds = 0;    // in steps
  int64_t tokens = 0;
  int64_t device_bytes = 0;  // at the peak (metrics.h)
};

// What a resumed run must know besides the rank's state.
struct TrainerState {
  int64_t step = 0, skipped = 0, skipped_in_row = 0;
  PlateauRate::State plateau;
  LoaderPosition data;
};

class Trainer {
 public:
  Trainer(Rank& rank, Loader& loader, const Config& config, const TrainerOptions& options,
          MetricsFile& metrics);

  TrainerResult run(const TrainerHooks& hooks);

  int64_t steps() const { return step_; }  // done
  // False while a step is at work: an error that ends it leaves weights of which some are new.
  bool between_steps() const { return between_steps_; }

  // Where the run stands, beside the rank's state (Rank::catalogue).
  TrainerState state() const {
    return {step_, skipped_, skipped_in_row_, plateau_.state(), loader_.position()};
  }
  void restore(const TrainerState& state);

 private:
  StepRow step_once();
  void count_skipped(const StepRow& row);

  Rank& rank_;
  Loader& loader_;
  const Config& config_;
  TrainerOptions options_;
  MetricsFile& metrics_;
  int64_t step_ = 0;     // done
  int64_t skipped_ = 0;  // steps skipped so far, and in a row
  int64_t skipped_in_row_ = 0;
  bool between_steps_ = true;
  PlateauRate plateau_;
  IoCounters moved_;              // at the last row
  double busy_ = 0, waited_ = 0;  // the same
  int64_t device_peak_ = 0;
};

}  // namespace lm
