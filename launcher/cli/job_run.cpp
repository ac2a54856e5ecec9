#include "launcher/cli/job_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/process.h"
#include "comm/shared_region.h"
#include "config/config_toml.h"
#include "launcher/cli/checked_run.h"
#include "launcher/cli/commands.h"
#include "launcher/cli/commit_hook.h"
#include "launcher/cli/end_launcher.h"
#include "launcher/cli/follower.h"
#include "launcher/cli/status_keeper.h"
#include "launcher/cli/supervise.h"
#include "launcher/control.h"
#include "launcher/environment.h"
#include "launcher/machine/interface.h"
#include "launcher/refusal_text.h"
#include "launcher/status.h"

namespace lm {
namespace {

void check_launch(const CommandLine& line, const LauncherJob& job) {
  if (!job.problem.empty()) throw usage_error(job.problem, "srun --mpi=pmix lmlaunch ...");
  if (line.has("--ranks")) {
    throw usage_error(
        fmt::format("--ranks inside an MPI job: {} has already started {} processes, each of which is a rank",
                    job.launcher, job.ranks),
        "leave --ranks out, or start lmlaunch without " + job.launcher);
  }
  if (line.has("--restarts")) {
    throw usage_error(
        "--restarts inside an MPI job: " + job.launcher + " ends the job with its first process",
        "leave --restarts out; configs/slurm/train.sbatch puts the job back into the queue");
  }
  if (beside_this_program("lmlaunch-mpi.so").empty()) {
    throw Error(Exit::kDoesNotFit,
                {.area = "MPI-34",
                 .what = "this is an MPI job, and this lmlaunch was built without Open MPI",
                 .place = job.launcher,
                 .next = "install Open MPI (Debian: openmpi-bin, libopenmpi-dev), then " + how_to_mend() +
                         "; on one machine --ranks N needs none"});
  }
  if (line.integer("--gpus").value_or(0) > 0) {
    throw usage_error(
        fmt::format("--gpus {} inside an MPI job: each of the {} processes that {} has started is a "
                    "rank with one GPU",
                    *line.integer("--gpus"), job.ranks, job.launcher),
        "leave --gpus out; --gpus 0 trains on the CPU");
  }
}

// The GPU of this process's rank: one for each process on the machine, or the single one that the launcher
// has chosen.
int place_of_gpu(const LauncherJob& job) {
  const int visible = visible_gpu_count();
  if (visible == 1 || job.local_rank < visible) return visible == 1 ? 0 : job.local_rank;
  throw Error(Exit::kDoesNotFit, {.area = "DEV-34",
                                  .what = fmt::format("more processes than GPUs: {} are visible", visible),
                                  .place = fmt::format("process {} of its machine", job.local_rank),
                                  .next = "start one process per GPU, or train on the CPU with --gpus 0"});
}

// The network interface between the ranks' GPUs: loopback on one machine, else the one towards the launcher;
// "": unknown.
std::string interface_between(const LauncherJob& job) {
  if (job.one_machine) return "lo";
  for (const std::string& address : job.launcher_addresses) {
    if (const std::string name = interface_towards(address); !name.empty()) return name;
  }
  return "";
}

// Rank 0's CLI process needs a moment after its rank has ended; mpirun kills it a second after the first
// process that ends with an error.
void wait_for_leader(const std::string& directory) {
  using namespace std::chrono_literals;
  const auto until = std::chrono::steady_clock::now() + 2s;
  while (!leader_left(directory) && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(20ms);
}

// One process of the job.
class JobRun {
 public:
  JobRun(const CommandLine& line, const LauncherJob& job) : line_(line), job_(job) {}

  int train() {
    prepare();
    RunStatus status;
    try {
      status = supervise();
    } catch (const Error& error) {
      log_error(error);
      status = failed_before_start(error);
    }
    if (refusal_ && leads()) status = failed_before_start(*refusal_);
    if (status.state == "failed" && tells_) tell_end(run_.directory, job_.id, status);
    if (leads()) {
      if (lock_) record_end(run_, status, *report_);
      // mpirun kills this process a second after another's failure.
      if (follower_) status.state == "failed" ? follower_->leave(status) : follower_->finish(status);
      if (hook_ && status.state != "failed") finish_hook(run_, *hook_, status);
      log_stop(status);
      if (status.state == "failed" && !job_.one_machine) end_mpirun_later();
    } else if (*status.exit_code != 0) {
      wait_for_leader(run_.directory);
    }
    return *status.exit_code;
  }

 private:
  bool leads() const { return job_.rank == 0; }

  // A CLI process that refuses the run starts its rank all the same: the ranks exchange refusals, so that all
  // end with the same code and one message.
  void prepare() {
    try {
      check_launch(line_, job_);
      run_ = leads() ? check_run(line_) : check_run_of_leader(line_);
      if (computes_on_gpu(run_.program)) gpu_ = gpu_of_rank(place_of_gpu(job_), interface_between(job_));
      if (leads()) {
        lock_.emplace(take_directory(run_));
        report_.emplace(run_.directory);
        follower_.emplace(run_.config, run_.directory);
        hook_.emplace(run_.config.checkpoint, run_.directory);
      }
    } catch (const Error& error) {
      refusal_ = error;
    }
    if (run_.program.empty()) run_.program = beside_this_program("lmlaunch-cpu");
  }

  RunStatus supervise() {
    const std::string plugin = beside_this_program("lmlaunch-mpi.so");
    // Without Open MPI, or without PMIx under srun, ranks cannot exchange refusals.
    const bool alone = plugin.empty() || run_.program.empty() || !job_.problem.empty();
    if (refusal_ && alone) return refused();
    Control control = Control::create();
    SharedRegion region = SharedRegion::create(1, 1 << 16);  // progress of the rank, for this process
    CommandLine handed_on = line_;
    handed_on.flags["--run-dir"] =
        run_.directory.empty() ? "." : run_.directory;  // "." if the run is refused
    handed_on.flags["--control-fd"] = std::to_string(control.fd());
    handed_on.flags["--ranks-fd"] = std::to_string(region.fd());
    handed_on.flags["--rank"] = std::to_string(job_.rank);
    handed_on.flags["--mpi"] = plugin;
    std::vector<int> keep = {control.fd(), region.fd()};
    if (lock_) {
      handed_on.flags["--lock-fd"] = std::to_string(lock_->fd());
      keep.push_back(lock_->fd());
    }
    if (refusal_) handed_on.flags["--refused"] = refusal_text(*refusal_);
    std::vector<std::string> variables = job_.one_machine ? one_machine_mpi() : std::vector<std::string>();
    variables.insert(variables.end(), gpu_.begin(), gpu_.end());
    if (lock_) keeper_.emplace(run_, control);
    const pid_t child = start_worker(run_.program, handed_on, keep, StopSignals::kIgnored, variables);
    WorkerCare care{.less_memory = [this] { return less_host_memory(line_); },
                    .rank_failed = [&region] { region.end(); },
                    .name = [this](int) { return fmt::format("rank {} on {}", job_.rank, host_name()); },
                    .operation = [&region](int) { return region.where(0).what; },
                    .launcher_ended = [this] { return getppid() != launcher_; },
                    .failed_elsewhere = [this] { return told_end(run_.directory, job_.id); },
                    .quiet = !leads()};
    if (lock_) care.left_behind = [this] { lock_->release(); };
    if (report_) {
      care.meanwhile = [this, &control] {
        report_->refresh();
        if (follower_) follower_->look();
        if (hook_) hook_->look(control.latest().checkpoint);
      };
    }
    const RunStatus status = supervise_run({child}, control, care);
    // A rank that ends by itself tells the other ranks; a killed one cannot. If the run was refused there is
    // nothing to tell, and the directory may be another run's.
    const SharedRegion::Position last = region.where(0);
    tells_ = status.reason.starts_with("killed:") || (last.meeting > 0 && last.what != kRefusalCall);
    return status;
  }

  RunStatus refused() const {
    if (leads()) log_error(*refusal_);
    return failed_before_start(*refusal_);
  }

  const CommandLine& line_;
  const LauncherJob& job_;
  const pid_t launcher_ = getppid();
  CheckedRun run_;
  std::vector<std::string> gpu_;  // visible to the rank; empty on the CPU
  std::optional<RunLock> lock_;
  std::optional<LiveReport> report_;  // on rank 0
  std::optional<Follower> follower_;  // on rank 0
  std::optional<CommitHook> hook_;    // on rank 0
  std::optional<StatusKeeper> keeper_;
  std::optional<Error> refusal_;
  bool tells_ = false;  // whether to tell the other CLI processes how this one's rank has failed
};

}  // namespace

int train_in_job(const CommandLine& line, const LauncherJob& job) {
  return JobRun(line, job).train();
}

}  // namespace lm
