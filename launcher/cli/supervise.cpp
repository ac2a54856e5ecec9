#include "launcher/cli/supervise.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "launcher/cli/first_cause.h"
#include "launcher/machine/survey.h"

namespace lm {
namespace {

// Time for the rank to end by itself after the second stop request; then it is killed.
constexpr int kGraceMs = 1000;
// Time for the other ranks to end after one has failed; then they are killed.
constexpr int kOthersMs = 3000;
// The same if a rank of another CLI process has failed: mpirun kills this process a second later.
constexpr int kElsewhereMs = 400;
// How often other CLI processes' records are read, and for how long after a rank that may have ended because
// of another.
constexpr int kAskMs = 100, kAskedLaterMs = 1500;
// Time from a rank's report of its end to the end itself; then it is killed.
constexpr int kEndMs = 10000;
// A rank that hangs in the kernel cannot be killed; it is left behind after this time.
constexpr int kLeaveMs = 2000;
// Poll interval: no signal announces that a rank is about to end.
constexpr int kLookMs = 500;

sigset_t waited_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD}) sigaddset(&set, signal);
  return set;
}

int64_t now_ms() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// Waits for a signal; 0 after `timeout_ms`.
int next_signal(int timeout_ms) {
  const sigset_t set = waited_signals();
  const timespec timeout{timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
  const int signal = sigtimedwait(&set, nullptr, &timeout);
  return signal > 0 ? signal : 0;
}

// The time that this process has waited for signals. A machine that is suspended or frozen meanwhile adds no
// more than one wait: its ranks stood still, too, and are not to be killed for it.
class WaitedTime {
 public:
  int64_t ms() const { return ms_; }
  int next_signal(int timeout_ms) {
    const int64_t before = now_ms();
    const int signal = lm::next_signal(timeout_ms);
    ms_ += std::clamp<int64_t>(now_ms() - before, 0, timeout_ms);
    return signal;
  }

 private:
  int64_t ms_ = 1;  // 0 is no time
};

// Ctrl-C in a terminal: the kernel sends it to every process of the foreground group.
bool has_it_from_terminal(pid_t child, const siginfo_t& told) {
  return told.si_signo == SIGINT && told.si_code == SI_KERNEL && getpgid(child) == getpgrp();
}

bool ended(pid_t child, int* wait_status) {
  return waitpid(child, wait_status, WNOHANG) == child;
}

// "error:config": the reason for one of our exit codes, if a rank gave none. Exit code 1 is also what
// libraries end with: it is ours only from a command that compares.
std::string reason_of_code(int code, bool compares = false) {
  if (code == static_cast<int>(Exit::kDiffer) && !compares) return "";
  for (const ExitCode& known : exit_codes()) {
    if (static_cast<int>(known.code) == code) return known.reason;
  }
  return "";
}

void print(const Error& error) {
  log_error(error);
}

// Under RLIMIT_AS (ulimit -v) libraries fail in odd ways when an allocation fails: the loader and libgomp
// exit with codes of their own, LibTorch's constructors abort, oneDNN dereferences a null pointer. "" without
// a limit.
std::string limit_of_addresses() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; libraries end so when a memory allocation fails, and the limit of address space (RLIMIT_AS) is " +
         format_bytes(static_cast<int64_t>(limit.rlim_cur));
}
constexpr const char* kRaiseLimit =
    "raise the limit (ulimit -v), or see `lmlaunch plan` for what a run needs";

// Prints why a signal ended the worker and returns the exit code for it. Out-of-memory kills are recognised
// by the cgroup's counter, which the caller has read before the start.
int report_death(int signal, int64_t oom_kills_before, const std::string& where, bool of_several = false,
                 const std::function<std::string()>& less_memory = {}) {
  std::string what = fmt::format("the worker was killed by signal {} ({})", signal, signal_name(signal));
  std::string next = "report this message with log.txt; it is a bug in lmlaunch or in a library";
  Exit code = of_several ? Exit::kPeerLost : Exit::kInternal;
  std::string area = of_several ? "PEER-08" : "BUG-70";
  if (signal == SIGKILL) {
    const MemoryLimit limit = read_memory_limit();
    const bool oom = read_oom_kills() > oom_kills_before;
    code = oom ? Exit::kHostMemory : Exit::kPeerLost;
    area = oom ? "MEM-16" : "PEER-08";
    if (oom) what = "out of host memory: the worker was killed by the kernel";
    what += limit.bytes > 0 ? "; cgroup limit " + format_bytes(limit.bytes) + " (" + limit.source + ")"
                            : "; no cgroup limit";
    const std::string settings = oom && less_memory ? less_memory() : "";
    next =
        std::string(oom ? "" : "unless someone killed it, it ran out of host memory: ") +
        (settings.empty() ? "see `lmlaunch plan`, lower train.micro_batch or set train.recompute = \"block\""
                          : "raise the limit, or set " + settings);
  } else if (signal == SIGTERM || signal == SIGHUP || signal == SIGINT) {
    code = Exit::kPeerLost;
    area = "PEER-08";
    next = "start the same command again";
  } else if (const std::string limit = limit_of_addresses(); !limit.empty()) {
    code = Exit::kHostMemory;
    area = "MEM-16";
    what += limit;
    next = kRaiseLimit;
  }
  print(Error(code, {.area = area, .what = what, .place = where, .next = next}));
  return static_cast<int>(code);
}

// Open MPI ends a rank whose mpirun is gone with a code of its own.
int report_launcher_ended(const std::string& where) {
  print(Error(Exit::kPeerLost, {.area = "PEER-08",
                                .what = "the launcher of this process (mpirun, srun) ended during the run",
                                .place = where,
                                .next = "start the same command again"}));
  return static_cast<int>(Exit::kPeerLost);
}

std::string position_text(int rank, const WorkerRecord& record, const WorkerCare& care) {
  const std::string operation = care.operation ? care.operation(rank) : "";
  return fmt::format("{}, step {}{}", care.name ? care.name(rank) : fmt::format("rank {}", rank), record.step,
                     operation.empty() ? "" : ", in \"" + operation + "\"");
}

// Rank 0 prints why it ends. Another one that has lost a rank leaves that to those that live: here they were
// killed before they said a word.
void report_silent_rank(const FirstCause& cause, const WorkerRecord& last, const WorkerCare& care) {
  const int silent = cause.killed_here();
  if (silent < 0 || cause.rank() == 0 || care.quiet) return;
  print(
      Error(Exit::kPeerLost,
            {.area = "PEER-08",
             .what = fmt::format("rank {} has lost another rank and ended; rank {} did not end within {} s, "
                                 "and was killed",
                                 cause.rank(), silent, kOthersMs / 1000),
             .place = position_text(silent, last, care),
             .next = fmt::format("log.rank{}.txt has what rank {} found; start the same command again",
                                 cause.rank(), cause.rank())}));
}

// Our exit code for an unknown one (a library called exit).
int report_strange_exit(int code, const std::string& where) {
  const std::string limit = limit_of_addresses();
  const Exit ours = limit.empty() ? Exit::kInternal : Exit::kHostMemory;
  print(Error(ours, {.area = limit.empty() ? "BUG-70" : "MEM-16",
                     .what = fmt::format(
                         "the worker ended with exit code {}, which is not one of lmlaunch's{}", code, limit),
                     .place = where,
                     .next = limit.empty() ? "report this message with log.txt" : kRaiseLimit}));
  return static_cast<int>(ours);
}

// How a run's ranks ended.
struct WorkerEnd {
  FirstCause cause;
  bool at_once = false;                     // killed after a second stop signal
  bool left = false;                        // a rank could not be killed
  std::optional<RunStatus> elsewhere = {};  // the first cause, if it is a rank of another CLI process
};

// The ranks of a run while at least one lives.
class WorkerWatch {
 public:
  WorkerWatch(const std::vector<pid_t>& ranks, const Control& control, const WorkerCare& care)
      : ranks_(ranks), control_(control), care_(care) {}

  bool alive() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](pid_t p) { return p > 0; });
  }
  // Reaps ended ranks. Returns whether one has just failed.
  bool reap() {
    bool failed = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      int wait_status = 0;
      if (ranks_[r] <= 0 || !ended(ranks_[r], &wait_status)) continue;
      ranks_[r] = 0;
      end.cause.take(static_cast<int>(r), wait_status, killed_, r == 0 ? control_.latest().exit_code : -1);
      failed = failed || !ends_well(wait_status);
    }
    if (failed && !std::exchange(failed_, true) && alive() && care_.rank_failed) care_.rank_failed();
    return failed;
  }
  void kill_all() {
    killed_ = true;
    for (const pid_t rank : ranks_) {
      if (rank > 0) kill(rank, SIGKILL);
    }
  }
  // Once: ends the ranks if one of another CLI process has failed.
  bool failed_elsewhere() {
    if (!care_.failed_elsewhere || end.elsewhere || failed_) return false;
    end.elsewhere = care_.failed_elsewhere();
    if (end.elsewhere && care_.rank_failed) care_.rank_failed();
    return end.elsewhere.has_value();
  }
  void warn_left() const {
    for (const pid_t rank : ranks_) {
      if (rank > 0)
        log_warning(
            "IO-05",
            fmt::format("process {} is left behind: it waits in the kernel, and ends when its disk responds",
                        rank));
    }
  }

  WorkerEnd end;

 private:
  std::vector<pid_t> ranks_;  // 0: reaped
  const Control& control_;    // rank 0's
  const WorkerCare& care_;
  bool failed_ = false;
  bool killed_ = false;  // all that lived
};

// Whether a rank has reported that it ends with an error.
bool fails_by(int exit_code) {
  return exit_code > 0 && exit_code != static_cast<int>(Exit::kStopped);
}

// The earlier of two times; 0 is none.
int64_t earlier(int64_t a, int64_t b) {
  return a == 0 ? b : std::min(a, b);
}

WorkerEnd wait_for_end(const std::vector<pid_t>& ranks, Control& control, const WorkerCare& care) {
  WorkerWatch watch(ranks, control, care);
  bool asked_twice = false;
  WaitedTime waited;
  int64_t kill_at = 0, leave_at = 0;  // in waited.ms(); 0: not yet known
  for (;;) {
    const bool failed = watch.reap();
    if (!watch.alive()) return watch.end;
    if (failed) kill_at = earlier(kill_at, waited.ms() + kOthersMs);
    const int signal = waited.next_signal(care.failed_elsewhere ? kAskMs : kLookMs);
    if (signal == 0 && kill_at == 0 && care.meanwhile) care.meanwhile();
    const int64_t now = waited.ms();
    if (watch.failed_elsewhere()) kill_at = earlier(kill_at, now + (care.quiet ? kOthersMs : kElsewhereMs));
    if (kill_at != 0 && leave_at == 0 && now >= kill_at) {
      watch.kill_all();
      watch.end.at_once = asked_twice;
      leave_at = now + kLeaveMs;
    } else if (leave_at != 0 && now >= leave_at) {
      watch.reap();
      if (!watch.alive()) return watch.end;
      watch.warn_left();
      watch.end.left = true;
      return watch.end;
    }
    if (kill_at == 0 && fails_by(control.latest().exit_code)) kill_at = now + kEndMs;
    if (signal == 0 || signal == SIGCHLD) continue;
    control.request_stop(signal);
    if (watch.end.elsewhere) continue;  // mpirun ends the remaining ranks
    if (control.stop_requests() == 1) {
      if (!care.quiet)
        log_line("lmlaunch: " + signal_name(signal) +
                 ": finishing the step, then saving; once more to stop at once");
    } else if (!std::exchange(asked_twice, true)) {
      if (!care.quiet) log_line("lmlaunch: " + signal_name(signal) + ": stopping at once");
      if (leave_at == 0) kill_at = now + kGraceMs;
    }
  }
}

// If a rank reports that another has ended, or that its library has ended it, the cause may arrive late.
void ask_once_more(WorkerEnd& end, const WorkerCare& care) {
  if (!care.failed_elsewhere || end.elsewhere || !WIFEXITED(end.cause.wait_status())) return;
  const int code = WEXITSTATUS(end.cause.wait_status());
  if (code != static_cast<int>(Exit::kPeerLost) && !reason_of_code(code).empty()) return;
  for (const int64_t until = now_ms() + kAskedLaterMs; !end.elsewhere && now_ms() < until;) {
    end.elsewhere = care.failed_elsewhere();
    if (!end.elsewhere) next_signal(kAskMs);
  }
}

RunStatus status_of_record(const WorkerRecord& last) {
  return {.state = "failed",
          .exit_code = 0,
          .reason = last.reason,
          .step = last.step,
          .checkpoint = last.checkpoint,
          .repeat = last.repeat};
}

void name_good_end(RunStatus& status, const Control& control) {
  if (status.exit_code == static_cast<int>(Exit::kStopped)) {
    status.state = "stopped";
    if (control.stop_requests() > 0) status.reason = "signal:" + signal_name(control.first_signal());
  } else if (status.exit_code == 0) {
    status.state = status.reason = "done";
  }
}

}  // namespace

void block_stop_signals() {
  const sigset_t set = waited_signals();
  sigprocmask(SIG_BLOCK, &set, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

bool stop_signal_came() {
  sigset_t set = waited_signals();
  sigdelset(&set, SIGCHLD);
  const timespec now{};
  return sigtimedwait(&set, nullptr, &now) > 0;
}

RunStatus supervise_run(const std::vector<pid_t>& ranks, Control& control, const WorkerCare& care) {
  const int64_t oom_kills = read_oom_kills();
  WorkerEnd end = wait_for_end(ranks, control, care);
  ask_once_more(end, care);
  if (end.left && care.left_behind) care.left_behind();
  const WorkerRecord last = control.latest();
  RunStatus out = status_of_record(last);
  const int rank = end.cause.rank(), wait_status = end.cause.wait_status();
  const bool gone = care.launcher_ended && care.launcher_ended();
  const bool dead = end.left || WIFSIGNALED(wait_status);
  const bool follows = !dead && WEXITSTATUS(wait_status) == static_cast<int>(Exit::kPeerLost);
  if (end.elsewhere) {
    out.exit_code = end.elsewhere->exit_code;
    out.reason = end.elsewhere->reason;
  } else if ((dead || follows) && end.at_once) {
    out.exit_code = static_cast<int>(Exit::kStopped);
  } else if (dead && last.exit_code >= 0 && rank == 0) {
    // The rank has reported how it ends; its death afterwards does not matter.
    out.exit_code = last.exit_code;
    if (out.reason.empty()) out.reason = reason_of_code(last.exit_code);
  } else if (dead) {
    const int signal = WTERMSIG(wait_status);
    out.reason = "killed:" + signal_name(signal);
    if (!end.left) out.killed_rank = rank;
    out.exit_code = report_death(signal, oom_kills, position_text(rank, last, care),
                                 ranks.size() > 1 || care.failed_elsewhere, care.less_memory);
  } else if (const int code = WEXITSTATUS(wait_status); !reason_of_code(code).empty()) {
    if (out.reason.empty() || rank != 0) out.reason = reason_of_code(code);
    out.exit_code = code;
    if (follows) report_silent_rank(end.cause, last, care);
  } else if (gone) {
    out.exit_code = report_launcher_ended(position_text(rank, last, care));
    out.reason = reason_of_code(*out.exit_code);
  } else {
    if (out.reason.empty() || rank != 0) out.reason = fmt::format("error:exit-{}", code);
    out.exit_code = report_strange_exit(code, position_text(rank, last, care));
  }
  name_good_end(out, control);
  return out;
}

RunStatus status_of_killed(const Control& control) {
  const WorkerRecord last = control.latest();
  RunStatus out = status_of_record(last);
  out.exit_code = last.exit_code >= 0 ? last.exit_code : static_cast<int>(Exit::kPeerLost);
  if (last.exit_code < 0) out.reason = "killed:lmlaunch";
  if (out.reason.empty()) out.reason = reason_of_code(last.exit_code);
  name_good_end(out, control);
  return out;
}

int supervise_command(pid_t child, bool compares) {
  const int64_t oom_kills = read_oom_kills();
  int wait_status = 0, passed_on = 0;
  while (!ended(child, &wait_status)) {
    const sigset_t set = waited_signals();
    siginfo_t told{};
    const int signal = sigwaitinfo(&set, &told);
    if (signal <= 0 || signal == SIGCHLD) continue;
    passed_on = signal;
    if (!has_it_from_terminal(child, told)) kill(child, signal);
  }
  if (!WIFSIGNALED(wait_status)) {
    const int code = WEXITSTATUS(wait_status);
    return reason_of_code(code, compares).empty() ? report_strange_exit(code, "the worker") : code;
  }
  const int signal = WTERMSIG(wait_status);
  if (passed_on == signal) {
    std::signal(signal, SIG_DFL);
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, signal);
    raise(signal);
    sigprocmask(SIG_UNBLOCK, &only, nullptr);
  }
  return report_death(signal, oom_kills, "the worker");
}

}  // namespace lm
