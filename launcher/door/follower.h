// Trackers and a webhook of a run (log.to, log.webhook): a Python program beside the ranks reads
// metrics.jsonl and passes it on (src/data/follow). It has a session of its own and the lowest priority, and
// nothing waits for it while the run goes on. One that dies is a note. Without these keys nothing is started.
// By the door alone, one thread.
#pragma once

#include <sys/types.h>

#include <string>

#include "config/config.h"
#include "launcher/status.h"

namespace lm {

// Throws Error(12) where Python or a library that log.to names is missing, Error(10) for an interpreter that
// cannot be started. TensorBoard's files need neither (train/event_file.h).
void require_trackers(const LogConfig& log);

class Follower {
 public:
  // Starts the program for the run in `directory`. Throws Error(12) where it cannot be started.
  Follower(const Config& config, const std::string& directory);
  ~Follower();  // kills it, if `finish` has not waited for it
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  // Says once who has stopped following.
  void look();
  // Tells it how the run has ended, and waits for it, 5 seconds at most; a stop signal ends the wait. Then it
  // is killed.
  void finish(const RunStatus& status);
  // The same without waiting: it ends by itself within those seconds.
  void leave(const RunStatus& status);

 private:
  bool tell(const RunStatus& status);
  void note(const std::string& what);

  std::string log_;  // of the program
  pid_t process_ = -1;
  int in_ = -1, out_ = -1;  // its standard input and output
  std::string said_;        // behind its last whole line
  bool noted_ = false;      // since the run's end
};

}  // namespace lm
