#include "launcher/door/start_run.h"

#include <sys/wait.h>

#include <csignal>
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

}  // namespace

int train_in_rank(const CommandLine& line) {
  block_stop_signals();  // first: from here on a stop signal is counted, and the run ends with 75
  const LauncherJob job = read_launcher_job();
  if (job.shared()) return train_in_job(line, job);
  const CheckedRun run = check_run(line);

  // From here on files are created.
  const RunLock lock = take_directory(run);
  Control control = Control::create();
  const auto ranks = static_cast<int>(line.integer("--ranks").value_or(line.integer("--gpus").value_or(1)));
  std::optional<SharedRegion> region;
  if (ranks > 1) region.emplace(SharedRegion::create(ranks));
  CommandLine handed_on = line;
  handed_on.flags["--run-dir"] = run.directory;
  handed_on.flags["--control-fd"] = std::to_string(control.fd());
  handed_on.flags["--lock-fd"] = std::to_string(lock.fd());
  LiveReport report(run.directory);
  Follower follower(run.config, run.directory);
  CommitHook hook(run.config.checkpoint, run.directory);
  RunStatus status;
  std::optional<StatusKeeper> keeper;
  try {
    // Stop signals go to the CLI, which counts them, not to the rank.
    const std::vector<pid_t> children =
        start_ranks(run.program, handed_on, {control.fd(), lock.fd()}, region ? &*region : nullptr);
    keeper.emplace(run, control);
    const auto operation = [&region](int rank) { return region ? region->where(rank).what : ""; };
    status = supervise_run(children, control,
                           {.less_memory = [&line] { return less_host_memory(line); },
                            .left_behind = [&lock] { lock.release(); },
                            .rank_failed = [&region] { region->end(); },
                            .meanwhile =
                                [&] {
                                  report.refresh();
                                  follower.look();
                                  hook.look(control.latest().checkpoint);
                                },
                            .operation = operation});
  } catch (const Error& error) {
    log_error(error);
    status = failed_before_start(error);
  }
  record_end(run, status, report);
  follower.finish(status);
  finish_hook(run, hook, status);
  log_stop(status);
  return *status.exit_code;
}

int command_in_rank(const CommandLine& line) {
  DeviceChoice configured = DeviceChoice::kCpu;  // export, verify and diff only move bytes
  if (line.command == "generate" || line.command == "chat") configured = DeviceChoice::kAuto;
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
