// A run's directory: whether a configuration may run in it, and the lock that keeps a second run out. The CLI
// takes the lock and its rank inherits the descriptor: an open-file-description lock lives until the last of
// them is closed. Nothing is created before the checks have passed. One thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/config_print.h"
#include "launcher/status.h"
#include "spec/model_spec.h"

namespace lm {

// runs/<the file's name without .toml>, unless the configuration names one.
std::string run_directory(const Config& config, const std::string& config_path);

// Throws Error(14) if `directory` holds a finished run, a run of another configuration (with the differences)
// or files of no run. A run that failed before its first step is replaced. `model`: of `config`,
// which a full fine-tune does not need. Keys in `overridden` may differ, and a larger train.steps or
// train.epochs trains a finished run further; returns the differences. Only reads.
std::vector<KeyDifference> check_run_directory(const std::string& directory, const Config& config,
                                               const ModelSpec& model,
                                               const std::vector<std::string>& overridden = {});

class RunLock {
 public:
  // Creates what is missing of `directory`, itself private to its owner; throws Error(13) with the owner if
  // another run holds it, and Error(12) if the directory cannot be created or written.
  explicit RunLock(const std::string& directory);
  ~RunLock();
  RunLock(RunLock&& other) noexcept;
  RunLock& operator=(RunLock&&) = delete;
  int fd() const { return fd_; }  // close-on-exec until the rank is started
  // Releases the lock also for the rank, which has inherited it: a rank stuck in the kernel would hold it.
  void release() const;
  // The owner that left the lock when it or the machine died; "" after an orderly end.
  const std::string& taken_over() const { return taken_over_; }

 private:
  int fd_ = -1;
  std::string taken_over_;
};

// Deletes temporary files of dead runs, and the configuration of a run that failed before its first step: no
// run resumes from it. The caller must hold the lock.
void remove_leftovers(const std::string& directory, const RunLock& lock);

// The CLI processes of an MPI job, on any machines, share how the first failed rank has ended in a file of
// the run's directory: a killed rank cannot tell it itself. Later failures change nothing.
void tell_end(const std::string& directory, const std::string& job, const RunStatus& status);
std::optional<RunStatus> told_end(const std::string& directory, const std::string& job);
// Whether the CLI process that held the directory's lock has ended in an orderly way.
bool leader_left(const std::string& directory);

}  // namespace lm
