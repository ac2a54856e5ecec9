// A run's checkpoints: which one it resumes from, when it saves, which ones it keeps, and what happens if a
// save fails. A save is begun after its step and committed while the next one runs (train/step_save.h). One
// thread, the rank's; the save's own thread commits, or with several ranks, which commit together, this one
// after that step.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/mirror.h"
#include "checkpoint/restore.h"
#include "launcher/worker/job.h"
#include "offload/pinned.h"
#include "train/trainer.h"

namespace lm {

// Valid checkpoints that a run may resume from, by checkpoint.resume, newest first; empty: it starts anew. A
// copy in checkpoint.mirror stands in for one that the run's directory lacks.
// Logs which ones are ignored and why, and deletes what interrupted saves have left. Throws Error(14) if
// there are some and none may be used.
std::vector<FoundCheckpoint> resumable_checkpoints(const Config& config, const std::string& run_directory);

class Checkpoints {
 public:
  // `lock` is the descriptor of the run's lock, -1 without one. With several ranks all make the same calls.
  Checkpoints(const Job& job, std::string run_directory, int lock, Group& group);
  ~Checkpoints();  // commits a save that has all its bytes
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  // Restores the newest of `found` whose every byte is as it was saved: state into the rank, position into
  // the trainer. A damaged one is set aside, and the one before it is taken. Throws Error(14) if none is
  // left, Error(11) if the adapters' base model is another one. Returns the length of metrics.jsonl at that
  // checkpoint.
  int64_t restore(const std::vector<FoundCheckpoint>& found, Rank& rank, Trainer& trainer);

  // The same from the newest of the run, after a failed step.
  int64_t go_back(Rank& rank, Trainer& trainer);

  // Whether a save is due after the last step.
  bool due(const Trainer& trainer, bool best);
  // Begins a save of the last step; completes an earlier one first.
  void begin(Rank& rank, const Trainer& trainer, MetricsFile& metrics);
  // Call before a step's row is written: waits for the save that was begun before the step. So no row is more
  // than checkpoint.every steps ahead of the last checkpoint, and a killed run repeats no more than that.
  // Does not wait if `every` is a time.
  void settle();
  // Call after every step: ends a finished save. Once it is committed, only the checkpoints that
  // checkpoint.keep allows are left. A full disk or an I/O error is a warning, until the third in a row: then
  // it is thrown.
  void poll();
  // Completes a pending save: flushes if bytes are missing, and commits.
  void complete();
  // After a failed step, before the rank is reset: drops a save that misses bytes of that step, completes any
  // other. A failure is a warning.
  void give_up();
  // Saves the last step and waits for it. Throws Error(20, 21).
  void save(Rank& rank, const Trainer& trainer, MetricsFile& metrics);
  // Saves the run's last step, unless checkpoint.every is 0, so that a longer run repeats nothing. A full
  // disk is a warning.
  void finish(Rank& rank, const Trainer& trainer, MetricsFile& metrics);

  // Loads the weights and state with the lowest eval loss into the rank, if they have been kept, and returns
  // their path; "" if not. The trainer's position does not change.
  std::string take_best(Rank& rank, const Trainer& trainer);

  const std::string& newest() const { return newest_; }  // path; "": none
  int64_t newest_step() const { return newest_step_; }
  // Waits until the mirror has the newest checkpoint, or has failed to get it.
  void wait_for_mirror() const;
  // Duration of the last save, from its beginning to its commit.
  double expected_seconds() const { return seconds_; }
  double seconds_since_save() const;
  // The last save is complete: frees the buffers that another one would use again.
  void free_buffers() { buffers_.reset(); }

 private:
  // A pending save.
  struct Pending;
  // Runs `body`, a part of that step's save, and returns whether it failed.
  bool fails(int64_t step, const std::function<void()>& body);
  void end();
  // All ranks together; with one rank on the save's thread.
  void commit(Pending& pending);
  void committed(int64_t step, const std::string& path, const std::vector<int64_t>& kept);
  // Removes checkpoints later than the one resumed from, and those that checkpoint.keep does not keep.
  void leave_behind(int64_t step, const TrainerState& state) const;
  std::vector<int64_t> kept(const TrainerState& state) const;
  // Restores one checkpoint into rank and trainer.
  void restore_from(const FoundCheckpoint& one, Rank& rank, Trainer& trainer);
  bool leads() const { return group_.rank() == 0; }
  bool alone() const { return group_.ranks() == 1; }
  // The manifest, without the hash of the base model in `sources`.
  Manifest about(const Trainer& trainer, int64_t metrics_bytes);
  const std::string& base_hash();
  void check_lock() const;

  const Job& job_;
  std::string run_, directory_;
  std::string copies_;              // directory of the mirror's checkpoints; "": none
  std::unique_ptr<Mirror> mirror_;  // on rank 0, if there is one
  int lock_;
  Group& group_;
  std::string newest_;
  int64_t newest_step_ = 0;
  double saved_at_;     // monotonic
  double seconds_ = 0;  // of the last save
  int64_t failures_ = 0;
  bool required_ = false;                // the pending save must not fail
  std::unique_ptr<PinnedPool> buffers_;  // buffers of a finished save, for the next one
  std::unique_ptr<Pending> pending_;
  // Computed once, on first use: reading a large model takes seconds. By the save's thread while there is
  // one.
  std::optional<std::string> base_hash_;
};

}  // namespace lm
