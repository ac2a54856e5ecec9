#include "launcher/cli/start_run.h"

#include <sys/wait.h>

#include <csignal>
#include <functional>
#include <optional>
#include <utility>

#include "base/log.h"
#include "base/process.h"
#include "comm/shared_region.h"
#include "config/config_toml.h"
#include "launcher/cli/checked_run.h"
#include "launcher/cli/commands.h"
#include "launcher/cli/commit_hook.h"
#include "launcher/cli/follower.h"
#include "launcher/cli/job_run.h"
#include "launcher/cli/restarts.h"
#include "launcher/cli/status_keeper.h"
#include "launcher/cli/supervise.h"
#include "launcher/control.h"
#include "launcher/environment.h"
#include "launcher/recorded.h"
#include "launcher/report/report.h"
#include "launcher/status.h"

namespace lm {
namespace {

// Starts all ranks of a run, or none.
std::vector<pid_t> start_workers(const std::string& executable, const CommandLine& line,
                                 std::vector<int> keep_fds, SharedRegion* region,
                                 const std::vector<std::string>& gpus) {
  if (region == nullptr) {
    return {start_worker(executable, line, keep_fds, StopSignals::kIgnored,
                         gpus.empty() ? std::vector<std::string>() : gpu_of_rank(gpus[0], "lo"))};
  }
  keep_fds.push_back(region->fd());
  CommandLine of_rank = line;
  of_rank.flags["--ranks-fd"] = std::to_string(region->fd());
  std::vector<pid_t> children;
  try {
    for (int r = 0; r < region->ranks(); ++r) {
      of_rank.flags["--rank"] = std::to_string(r);
      const std::vector<std::string> gpu = !gpus.empty() ? gpu_of_rank(gpus[static_cast<size_t>(r)], "lo")
                                           : computes_on_gpu(executable) ? gpu_of_rank(r, "lo")
                                                                         : std::vector<std::string>();
      children.push_back(start_worker(executable, of_rank, keep_fds, StopSignals::kIgnored, gpu));
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
  Start(const CheckedRun& run, const CommandLine& line, const RunLock& lock, StartWorkers ranks)
      : run_(run), line_(line), lock_(lock), ranks_(std::move(ranks)), control_(Control::create()) {
    if (ranks_.count > 1) region_.emplace(SharedRegion::create(ranks_.count));
  }

  // `meanwhile` is called about twice per second, with the path of the newest checkpoint.
  RunStatus supervise(const std::function<void(const std::string&)>& meanwhile) {
    CommandLine handed_on = line_;
    for (const char* flag : {"--restarts", "--elastic"}) handed_on.flags.erase(flag);
    handed_on.flags["--run-dir"] = run_.directory;
    handed_on.flags["--control-fd"] = std::to_string(control_.fd());
    handed_on.flags["--lock-fd"] = std::to_string(lock_.fd());
    try {
      keeper_.emplace(run_, control_);
      // Stop signals go to the CLI, which counts them, not to the rank.
      const std::vector<pid_t> children = start_workers(run_.program, handed_on, {control_.fd(), lock_.fd()},
                                                        region_ ? &*region_ : nullptr, ranks_.gpus);
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
  const StartWorkers ranks_;
  Control control_;
  std::optional<SharedRegion> region_;
  std::optional<StatusKeeper> keeper_;
  bool left_ = false;
};

// The ranks that the command line asks for. With --elastic their GPUs have names that stay when one is gone.
StartWorkers first_ranks(const CheckedRun& run, const CommandLine& line) {
  StartWorkers out{static_cast<int>(asked_ranks(line))};
  if (!line.has("--elastic") || !computes_on_gpu(run.program)) return out;
  out.gpus = visible_gpu_names();
  const auto count = static_cast<size_t>(out.count);
  out.gpus.resize(out.gpus.size() < count ? 0 : count);
  return out;
}

// The same command for a later start: it resumes from the newest checkpoint, whichever the first was told to
// take.
CommandLine resuming(CommandLine line) {
  const std::string key = "checkpoint.resume=";
  std::erase_if(line.overrides, [&](const std::string& one) { return one.starts_with(key); });
  line.overrides.push_back(key + "auto");
  return line;
}

}  // namespace

int train_in_worker(const CommandLine& line) {
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
  Restarts restarts(line.integer("--restarts").value_or(0), line.has("--elastic"), first_ranks(run, line));
  std::optional<Start> start;
  RunStatus status;
  do {
    if (start) remove_leftovers(run.directory, lock);
    start.emplace(run, start ? later : line, lock, restarts.ranks());
    status = start->supervise([&](const std::string& checkpoint) {
      report.refresh();
      follower.look();
      hook.look(checkpoint);
    });
    status.ranks = restarts.ranks().count;
    status.ranks_asked = restarts.asked();
  } while (start->may_be_repeated() && restarts.again(status, visible_gpu_names));
  record_end(run, status, report);
  follower.finish(status);
  finish_hook(run, hook, status);
  log_stop(status);
  return *status.exit_code;
}

int command_in_worker(const CommandLine& line) {
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
  const std::string program = worker_program(line, configured);
  block_stop_signals();
  return supervise_command(start_worker(program, line, {}, StopSignals::kDefault), line.command == "diff");
}

}  // namespace lm
