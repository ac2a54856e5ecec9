// Run status, as <run>/status.json and as the last line on stderr. During a run rank 0 writes the file; at
// the end the CLI process does, after reaping. Both replace it atomically. Pure values.
#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>

#include "base/error.h"

namespace lm {

struct LogConfig;

struct RunStatus {
  std::string state;             // "running", "done", "stopped" (on request), "failed"
  std::optional<int> exit_code;  // empty while running
  std::string reason;            // "done", "signal:SIGUSR1", "error:CONF-20", "killed:SIGKILL"
  int64_t step = 0;              // optimizer steps done
  std::string checkpoint;        // path of the last committed one; "": none
  int64_t repeat = 0;            // steps after it that a resumed run repeats
  std::string on_commit = "";    // how the last command of checkpoint.on_commit failed; "": it did not
  // With --elastic: how many ranks share the run, if they are fewer than were asked for; else 0.
  int64_t ranks = 0, ranks_asked = 0;
  int killed_rank = -1;  // whose death by a signal ended the run; -1: none, or unknown; not in the file
  int64_t pid = 0;       // of the run's first process, `lmlaunch` itself; 0: of this process
};

// The status of a run that could not begin.
RunStatus failed_before_start(const Error& error);

// "lmlaunch: stop code=75 reason=signal:SIGUSR1 step=1234 checkpoint=/r/checkpoints/step_00001234 repeat=0"
std::string stop_line(const RunStatus& status);

// Logs that line.
void log_stop(const RunStatus& status);

// Applies log.format to what this process logs from here on.
void use_log_format(const LogConfig& config, int rank);

// Writes <directory>/status.json, with the time and this host's name, by which a stale one is recognised;
// throws Error(20, 21) if it cannot be written.
void write_status(const std::string& directory, const RunStatus& status);
// Name of this machine.
std::string host_name();
// "2026-01-31T12:00:00Z".
std::string time_text(std::time_t time);
// Reads a status file; empty if there is none or it is not ours.
std::optional<RunStatus> read_status(const std::string& directory);

}  // namespace lm
