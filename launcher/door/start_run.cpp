#include "launcher/door/start_run.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <csignal>
#include <functional>
#include <optional>

#include "base/log.h"
#include "base/process.h"
#include "comm/shared_region.h"
#include "config/config_toml.h"
#include "launcher/control.h"
#include "launcher/door/checked_run.h"
#include "launcher/door/commands.h"
#include "launcher/door/commit_hook.h"
#include "launcher/door/follower.h"
#include "launcher/door/job_run.h"
#include "launcher/door/status_keeper.h"
#include "launcher/door/supervise.h"
#include "launcher/environment.h"
#include "launcher/recorded.h"
#include "launcher/report/report.h"
#include "launcher/status.h"

namespace lm {
namespace {

// Starts all ranks of a run, or none.
std::vector<pid_t> start_ranks(const std::string& executable, const CommandLine& line,
                               std::vector<int> keep_fds, SharedRegion* region) {
  if (region == nullptr) return {start_rank(executable, line, keep_fds, StopSignals::kIgnored)};
  keep_fds.push_back(region->fd());
  CommandLine of_rank = line;
  of_rank.flags["--ranks-fd"] = std::to_string(region->fd());
  std::vector<pid_t> children;
  try {
    for (int r = 0; r < region->ranks(); ++r) {
      of_rank.flags["--rank"] = std::to_string(r);
      const std::vector<std::string> gpu =
          computes_on_gpu(executable) ? gpu_of_rank(r, "lo") : std::vector<std::string>();
      children.push_back(start_rank(executable, of_rank, keep_fds, StopSignals::kIgnored, gpu));
    }
  } catch (const Error&) {
    for (const pid_t child : children) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    throw;
  }
  return children;
}

// One start of a run's ranks, and what they share with this process.
class Start {
 public:
  Start(const CheckedRun& run, const CommandLine& line, const RunLock& lock)
      : run_(run), line_(line), lock_(lock), control_(Control::create()) {
    const auto ranks = static_cast<int>(line.integer("--ranks").value_or(line.integer("--gpus").value_or(1)));
    if (ranks > 1) region_.emplace(SharedRegion::create(ranks));
  }

  // `meanwhile` is called about twice per second, with the path of the newest checkpoint.
  RunStatus supervise(const std::function<void(const std::string&)>& meanwhile) {
    CommandLine handed_on = line_;
    handed_on.flags.erase("--restarts");
    handed_on.flags["--run-dir"] = run_.directory;
    handed_on.flags["--control-fd"] = std::to_string(control_.fd());
    handed_on.flags["--lock-fd"] = std::to_string(lock_.fd());
    try {
      // Stop signals go to the CLI, which counts them, not to the rank.
      const std::vector<pid_t> children =
          start_ranks(run_.program, handed_on, {control_.fd(), lock_.fd()}, region_ ? &*region_ : nullptr);
      keeper_.emplace(run_, control_);
      return supervise_run(
          children, control_,
          {.less_memory = [this] { return less_host_memory(line_); },
           .left_behind =
               [this] {
                 left_ = true;
                 lock_.release();
               },
           .rank_failed = [this] { region_->end(); },
           .meanwhile = [&] { meanwhile(control_.latest().checkpoint); },
           .operation = [this](int rank) { return region_ ? region_->where(rank).what : ""; }});
    } catch (const Error& error) {
      log_error(error);
      left_ = true;
      return failed_before_start(error);
    }
  }

  // Whether its end may be followed by another start: its ranks are gone, and nobody has asked for the end.
  bool may_be_repeated() const { return !left_ && control_.stop_requests() == 0; }

 private:
  const CheckedRun& run_;
  const CommandLine& line_;
  const RunLock& lock_;
  Control control_;
  std::optional<SharedRegion> region_;
  std::optional<StatusKeeper> keeper_;
  bool left_ = false;
};

// Which ends --restarts N answers with another start: a lost or hanging rank, at most N times; and once the
// kernel's kill for want of memory, which may have been another process's fault.
class Restarts {
 public:
  explicit Restarts(int64_t most) : most_(most) {}

  bool again(const RunStatus& status) {
    const int code = *status.exit_code;
    const bool lost =
        code == static_cast<int>(Exit::kPeerLost) || code == static_cast<int>(Exit::kNoProgress);
    const bool killed =
        code == static_cast<int>(Exit::kHostMemory) && status.reason == "killed:SIGKILL" && !memory_;
    if (done_ >= most_ || (!lost && !killed)) return false;
    memory_ = memory_ || killed;
    ++done_;
    log_note("RUN-42",
             fmt::format("restart {} of {}: code {} ({}) after step {}; {}", done_, most_, code,
                         status.reason, status.step,
                         status.checkpoint.empty() ? "there is no checkpoint yet"
                                                   : "the newest checkpoint is " + status.checkpoint));
    return true;
  }

 private:
  int64_t most_, done_ = 0;
  bool memory_ = false;
};

// The same command for a later start: it resumes from the newest checkpoint, whichever the first was told to
// take.
CommandLine resuming(CommandLine line) {
  const std::string key = "checkpoint.resume=";
  std::erase_if(line.overrides, [&](const std::string& one) { return one.starts_with(key); });
  line.overrides.push_back(key + "auto");
  return line;
}

}  // namespace

int train_in_rank(const CommandLine& line) {
  block_stop_signals();  // first: from here on a stop signal is counted, and the run ends with 75
  const LauncherJob job = read_launcher_job();
  if (job.shared()) return train_in_job(line, job);
  const CheckedRun run = check_run(line);

  // From here on files are created.
  const RunLock lock = take_directory(run);
  LiveReport report(run.directory);
  Follower follower(run.config, run.directory);
  CommitHook hook(run.config.checkpoint, run.directory);
  const CommandLine later = resuming(line);
  Restarts restarts(line.integer("--restarts").value_or(0));
  std::optional<Start> start;
  RunStatus status;
  do {
    start.emplace(run, start ? later : line, lock);
    status = start->supervise([&](const std::string& checkpoint) {
      report.refresh();
      follower.look();
      hook.look(checkpoint);
    });
  } while (start->may_be_repeated() && restarts.again(status));
  record_end(run, status, report);
  follower.finish(status);
  finish_hook(run, hook, status);
  log_stop(status);
  return *status.exit_code;
}

int command_in_rank(const CommandLine& line) {
  DeviceChoice configured = DeviceChoice::kCpu;  // export, merge, verify and diff only move bytes
  if (line.command == "generate" || line.command == "chat" || line.command == "serve")
    configured = DeviceChoice::kAuto;
  if (line.command == "eval") {
    const std::string& what = line.positional[0];
    const bool file = names_configuration(what);
    const std::string run = file ? "" : run_of(what);
    configured = DeviceChoice::kAuto;  // for a model
    // A run's recorded device is used unless the command line chooses one.
    if (file || (!run.empty() && !line.has("--gpus") && !line.has("--ranks")))
      configured = load_config(file ? what : run + "/config.toml", line.overrides).run.device;
  }
  const std::string program = rank_program(line, configured);
  block_stop_signals();
  return supervise_command(start_rank(program, line, {}, StopSignals::kDefault), line.command == "diff");
}

}  // namespace lm
