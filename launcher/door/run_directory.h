// A run's directory: whether a configuration may run in it, and the lock that keeps a second run out. The
// door takes the lock and its rank inherits the descriptor: an open-file-description lock lives until the
// last of them is gone. Nothing is created before the checks have passed. One thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/config_print.h"
#include "launcher/status.h"
#include "spec/name_map.h"

namespace lm {

// runs/<the file's name without .toml>, unless the configuration names one.
std::string run_directory(const Config& config, const std::string& config_path);

// Throws Error(14) when `directory` holds a finished run, a run of another configuration (naming what
// differs) or files that are no run's. A run that failed before its first step left nothing to lose and
// stands in nobody's way. `names`: of the model that `config` trains. Keys in `overridden` may differ, and a
// larger train.steps or train.epochs trains a finished run further; what differs is returned. Reads only.
std::vector<KeyDifference> check_run_directory(const std::string& directory, const Config& config,
                                               const NameMap& names,
                                               const std::vector<std::string>& overridden = {});

class RunLock {
 public:
  // Creates what is missing of `directory`, itself for its owner alone; throws Error(13) naming the owner
  // when another run holds it, and Error(12) when the directory cannot be made or written.
  explicit RunLock(const std::string& directory);
  ~RunLock();
  RunLock(RunLock&& other) noexcept;
  RunLock& operator=(RunLock&&) = delete;
  int fd() const { return fd_; }  // close-on-exec until the rank is started
  // Lets go of it for the rank, too, which has inherited it: one that the kernel keeps would hold it.
  void release() const;
  // Who held it when the machine or the run died without letting go; "" if it was left in order.
  const std::string& taken_over() const { return taken_over_; }

 private:
  int fd_ = -1;
  std::string taken_over_;
};

// Deletes what dead runs were writing when they died, and the configuration of one that failed before its
// first step: no run goes on from it. Whoever holds the lock is alone.
void remove_leftovers(const std::string& directory, const RunLock& lock);

// The doors of an MPI job, on whatever machines, tell one another by a file in the run's directory how the
// first rank that failed has ended: a rank that was killed cannot say so itself. Later ones change nothing.
void tell_end(const std::string& directory, const std::string& job, const RunStatus& status);
std::optional<RunStatus> told_end(const std::string& directory, const std::string& job);
// Whether the door that held the directory's lock has ended in order.
bool leader_left(const std::string& directory);

}  // namespace lm
