// A command after each committed checkpoint (checkpoint.on_commit): an argument list without a shell. The CLI
// process of rank 0 starts it, because a worker with much pinned memory cannot fork cheaply; training never
// waits for it. One command runs at a time; of the checkpoints that are committed meanwhile the newest
// follows. A command that fails is a warning on stderr and in log.txt, and the run's status names it. CLI
// only, one thread.
#pragma once

#include <sys/types.h>

#include <string>

#include "config/config.h"
#include "launcher/cli/checked_run.h"
#include "launcher/status.h"

namespace lm {

// Throws Error(12) if the program of checkpoint.on_commit does not exist or cannot be executed.
void require_hook(const CheckpointConfig& config);

class CommitHook {
 public:
  // `directory`: the run's; later lines of this process also go to its log.txt. <directory>/on_commit keeps
  // the command's output and the last checkpoint that a command has ended well with, so that a later start
  // does not repeat it, and passes on one whose command was interrupted.
  CommitHook(const CheckpointConfig& config, std::string directory);
  ~CommitHook();  // kills the command
  CommitHook(const CommitHook&) = delete;
  CommitHook& operator=(const CommitHook&) = delete;

  // Call often, with the path of the newest committed checkpoint ("": none): starts a command, ends one that
  // has reached its limit, logs a failure.
  void look(const std::string& checkpoint);
  // After the run's end: waits for the last checkpoint's command. A stop signal ends the wait, and kills it.
  void finish(const std::string& checkpoint);
  // The last failure, "exit code 3 for step_00000100"; "": none since the last command that ended well.
  const std::string& failure() const { return failure_; }

 private:
  bool busy() const { return process_ > 0; }
  bool due(const std::string& checkpoint) const;
  void start(const std::string& checkpoint);
  void end_if_due();
  void fail(const std::string& why);
  void kill_group();

  const CheckpointConfig& config_;
  std::string own_;      // <run>/on_commit
  std::string handled_;  // the last checkpoint that a command was started for, as `identity` writes it
  std::string current_;  // the running command's
  std::string failure_;
  pid_t process_ = -1;
  double until_ = 0;  // monotonic: when it is killed
};

// Waits for the command of the run's last checkpoint. A failure is added to the run's recorded status.
void finish_hook(const CheckedRun& run, CommitHook& hook, RunStatus& status);

}  // namespace lm
