// A run's checkpoints: which one it goes on from, when it saves, what it keeps, and what becomes of a save
// that fails. A save is begun after its step and committed while the next one runs (train/step_save.h). One
// thread, the rank's; the commit is made by that of the save, or, as it takes all ranks, after that step.
#pragma once

#include <memory>
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
  // `lock` is the descriptor of the run's lock, -1 without one. With several ranks all make the same calls.
  Checkpoints(const Job& job, std::string run_directory, int lock, Group& group);
  ~Checkpoints();  // a save that has all its bytes is still committed
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  // The newest of `found` whose every byte is as it was saved: state into the rank, position into the
  // trainer. What fails is set aside, and the one before it is taken. Throws Error(14) where none is left,
  // Error(11) where the model that adapters stand on is another one. The bytes of metrics.jsonl up to it.
  int64_t restore(const std::vector<FoundCheckpoint>& found, Rank& rank, Trainer& trainer);

  // The same from the newest of the run, after a step that failed.
  int64_t go_back(Rank& rank, Trainer& trainer);

  // Whether a save is due after the step that was just done.
  bool due(const Trainer& trainer, bool best);
  // Begins a save of the step that was just done; one that was begun before is completed first.
  void begin(Rank& rank, const Trainer& trainer, MetricsFile& metrics);
  // To be called before a step's row is written: the save that was begun before the step has come to its end.
  // So no row is more than checkpoint.every steps ahead of the last checkpoint, and a run that is killed
  // repeats no more. Where `every` is a time, nothing is waited for.
  void settle();
  // To be called after every step: says what has become of a save. Once it is committed, only what
  // checkpoint.keep says is left. A full disk or an I/O error is a warning, until the third in a row: then it
  // is thrown.
  void poll();
  // Completes a save that was begun: with a flush where bytes are missing, and its commit.
  void complete();
  // After a step that failed, before the rank is reset: a save that misses bytes of that step is dropped, any
  // other is completed. A failure is a warning.
  void give_up();
  // The step that was just done is saved when this returns, or Error(20, 21) is thrown.
  void save(Rank& rank, const Trainer& trainer, MetricsFile& metrics);
  // After the run's last step, unless checkpoint.every is 0: so that nothing would be repeated by whoever
  // goes on from here. A disk that is full is a warning.
  void finish(Rank& rank, const Trainer& trainer, MetricsFile& metrics);

  // The weights and state after the step with the least held-out loss into the rank, where they have been
  // kept: their path; "" where they have not. The trainer stays where it is.
  std::string take_best(Rank& rank, const Trainer& trainer);

  const std::string& newest() const { return newest_; }  // path; "" none
  int64_t newest_step() const { return newest_step_; }
  // What a save takes from its beginning to its end, by the last one.
  double expected_seconds() const { return seconds_; }
  double seconds_since_save() const;

 private:
  // A save between its beginning and its end.
  struct Pending;
  // Carries out `body`, a part of the save of that step, and gives whether it failed.
  bool fails(int64_t step, const std::function<void()>& body);
  void end();
  // All ranks at once; of one alone by the thread of the save.
  void commit(Pending& pending);
  void committed(int64_t step, const std::string& path, const std::vector<int64_t>& kept);
  // Those later than the one that the run goes on from, and those that checkpoint.keep does not want.
  void leave_behind(int64_t step, const TrainerState& state) const;
  std::vector<int64_t> kept(const TrainerState& state) const;
  // Of one checkpoint into rank and trainer.
  void restore_from(const FoundCheckpoint& one, Rank& rank, Trainer& trainer);
  bool leads() const { return group_.rank() == 0; }
  bool alone() const { return group_.ranks() == 1; }
  // But for what `sources` says of the base model.
  Manifest about(const Trainer& trainer, int64_t metrics_bytes);
  const std::string& base_hash();
  void check_lock() const;

  const Job& job_;
  std::string run_, directory_;
  int lock_;
  Group& group_;
  std::string newest_;
  int64_t newest_step_ = 0;
  double saved_at_;     // monotonic
  double seconds_ = 0;  // of the last save
  int64_t failures_ = 0;
  bool required_ = false;                // the save at hand must not fail
  std::unique_ptr<PinnedPool> buffers_;  // that a save has left for the next one
  std::unique_ptr<Pending> pending_;
  // Once asked for: reading a large model takes seconds. The save's thread does, while there is a save.
  std::optional<std::string> base_hash_;
};

}  // namespace lm
