#include "train/trainer.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

namespace lm {
namespace {

constexpr int64_t kSkipsInRow = 5;      // more end the run
constexpr int64_t kSkipsPerMille = 10;  // of all steps, once a hundred are done
constexpr int64_t kSkipWindow = 100;

}  // namespace

Trainer::Trainer(Rank& rank, Loader& loader, const Config& config, const TrainerOptions& options,
                 MetricsFile& metrics)
    : rank_(rank),
      loader_(loader),
      config_(config),
      options_(options),
      metrics_(metrics),
      plateau_(config.optimizer.min_lr_ratio) {}

TrainerResult Trainer::run(const TrainerHooks& hooks) {
  TrainerResult result;
  while (step_ < options_.total_steps) {
    if (hooks.stop_requested && hooks.stop_requested()) {
      result.stopped = true;
      break;
    }
    const StepRow row = step_once();
    metrics_.write(row);
    if (hooks.on_step) hooks.on_step(row);
    count_skipped(row);
    result.seconds += row.step_ms / 1e3;
    result.tokens += row.tokens;
    const int64_t every = config_.train.eval_every;
    if (hooks.evaluate && every > 0 && step_ % every == 0 && step_ < options_.total_steps) {
      const double loss = hooks.evaluate(step_);
      // What a warm-up reaches says nothing of the full rate.
      const bool warm = step_ > warmup_steps(config_.optimizer, options_.total_steps);
      if (warm && config_.optimizer.schedule == LrSchedule::kReduceLrOnPlateau) plateau_.observe(loss);
    }
  }
  result.steps = step_;
  result.device_bytes = device_peak_;
  return result;
}

StepRow Trainer::step_once() {
  const double start = monotonic_seconds();
  const StepBatches batches = loader_.next();
  const double factor = schedule_factor(config_.optimizer, step_, options_.total_steps) * plateau_.factor();
  const double lr = config_.optimizer.lr * factor;
  between_steps_ = false;
  const StepResult done = rank_.step().run(batches, step_ + 1, lr);
  between_steps_ = true;
  ++step_;
  StepRow row;
  row.step = step_;
  row.loss = done.loss;
  row.grad_norm = done.grad_norm;
  row.lr = lr;
  row.skipped = done.skipped;
  row.fault = done.fault;
  row.target_tokens = batches.target_tokens;
  for (const Batch& batch : batches.micro) row.tokens += batch.tokens();
  const double seconds = monotonic_seconds() - start;
  row.step_ms = seconds * 1e3;
  row.tokens_per_s = static_cast<double>(row.tokens) / seconds;
  if (options_.sol_seconds) row.sol_pct = 100 * options_.sol_seconds(work_of(batches)) / seconds;
  // Within a step nothing of ours is allocated, and LibTorch gives nothing back: between steps is the peak.
  row.device_bytes = device_peak_ = std::max(device_peak_, device_bytes());
  row.host_bytes = resident_bytes();
  if (DeviceClock* const clock = rank_.far().clock()) clock->collect();
  const IoCounters moved = rank_.far().counters();
  const double busy = rank_.far().busy_seconds();
  const double waited = rank_.far().wait_seconds();
  row.read_bytes = moved.read_bytes - moved_.read_bytes;
  row.written_bytes = moved.written_bytes - moved_.written_bytes;
  row.hidden_pct = hidden_pct(busy - busy_, waited - waited_);
  moved_ = moved;
  busy_ = busy;
  waited_ = waited;
  return row;
}

void Trainer::count_skipped(const StepRow& row) {
  if (!row.skipped) {
    skipped_in_row_ = 0;
    return;
  }
  ++skipped_;
  ++skipped_in_row_;
  const std::string where = "step " + std::to_string(row.step) + " rank 0 " + row.fault;
  log_warning("NUM-12", where + ": step skipped, no weight has changed; loss " + std::to_string(row.loss) +
                            ", gradient norm " + std::to_string(row.grad_norm));
  const bool too_many = row.step >= kSkipWindow && skipped_ * 1000 > row.step * kSkipsPerMille;
  if (skipped_in_row_ <= kSkipsInRow && !too_many) return;
  throw Error(Exit::kNumerics, {.area = "NUM-12",
                                .what = where + ": " + std::to_string(skipped_) + " steps were skipped, " +
                                        std::to_string(skipped_in_row_) + " in a row",
                                .place = "",
                                .next = "lower optimizer.lr or raise optimizer.warmup",
                                .kept = ""});
}

void Trainer::restore(const TrainerState& state) {
  step_ = state.step;
  skipped_ = state.skipped;
  skipped_in_row_ = state.skipped_in_row;
  plateau_.restore(state.plateau);
  loader_.restore(state.data);
}

}  // namespace lm
