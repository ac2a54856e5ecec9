// A run's checkpoints: which one it goes on from, when it saves, what it keeps, and what becomes of a save
// that fails. One thread, the rank's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/restore.h"
#include "launcher/rank/job.h"
#include "train/trainer.h"

namespace lm {

// Whole checkpoints that a run may go on from, as checkpoint.resume says, newest first; empty: it starts.
// Notes what is ignored and why, and deletes what interrupted saves have left. Throws Error(14) where there
// are some and none may be used.
std::vector<FoundCheckpoint> resumable_checkpoints(const Config& config, const std::string& run_directory);

class Checkpoints {
 public:
  // `lock` is the descriptor of the run's lock, -1 without one.
  Checkpoints(const Job& job, std::string run_directory, int lock);

  // The newest of `found` whose every byte is as it was saved: state into the rank, position into the
  // trainer. What fails is set aside, and the one before it is taken. Throws Error(14) where none is left,
  // Error(11) where the model that adapters stand on is another one. The bytes of metrics.jsonl up to it.
  int64_t restore(const std::vector<FoundCheckpoint>& found, Rank& rank, Trainer& trainer);

  // The same from the newest of the run, after a step that failed.
  int64_t go_back(Rank& rank, Trainer& trainer);

  // Whether a save is due after the step that was just done.
  bool due(const Trainer& trainer, bool best) const;
  // Saves; afterwards only what checkpoint.keep says is left. A full disk or an I/O error is a warning, until
  // the third in a row: then it is thrown. `required`: at once.
  void save(Rank& rank, const Trainer& trainer, MetricsFile& metrics, bool required = false);

  const std::string& newest() const { return newest_; }  // path; "" none
  int64_t newest_step() const { return newest_step_; }
  // What a save takes, by the last one.
  double expected_seconds() const { return seconds_; }

 private:
  Manifest about(const Trainer& trainer, int64_t metrics_bytes);
  const std::string& base_hash();
  void check_lock() const;

  const Job& job_;
  std::string run_, directory_;
  int lock_;
  std::string newest_;
  int64_t newest_step_ = 0;
  double saved_at_;     // monotonic
  double seconds_ = 0;  // of the last save
  int64_t failures_ = 0;
  std::optional<std::string> base_hash_;  // once asked for: reading a large model takes seconds
};

}  // namespace lm
