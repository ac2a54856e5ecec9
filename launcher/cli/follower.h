// Trackers and a webhook of a run (log.to, log.webhook): a Python program beside the ranks reads
// metrics.jsonl and passes it on (src/data/follow). It has its own session and the lowest priority, and the
// run never waits for it while it trains. If it dies, a note is logged. Without these keys nothing is
// started. CLI only, one thread.
#pragma once

#include <sys/types.h>

#include <string>

#include "config/config.h"
#include "launcher/status.h"

namespace lm {

// Throws Error(12) if Python or a library that log.to names is missing, Error(10) for an interpreter that
// cannot be started. TensorBoard's files need neither (train/event_file.h).
void require_trackers(const LogConfig& log);

class Follower {
 public:
  // Starts the program for the run in `directory`. Throws Error(12) if it cannot be started.
  Follower(const Config& config, const std::string& directory);
  ~Follower();  // kills it, unless `finish` has waited for it
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  // Logs the program's messages, such as a tracker that failed.
  void look();
  // Passes on how the run has ended, and waits for the program, 5 seconds at most; a stop signal ends the
  // wait. Then kills it.
  void finish(const RunStatus& status);
  // The same without waiting: the program ends by itself within those seconds.
  void leave(const RunStatus& status);

 private:
  bool tell(const RunStatus& status);
  void note(const std::string& what);

  std::string log_;  // of the program
  pid_t process_ = -1;
  int in_ = -1, out_ = -1;  // its standard input and output
  std::string said_;        // text after its last complete line
  bool noted_ = false;      // since the run's end
};

}  // namespace lm
