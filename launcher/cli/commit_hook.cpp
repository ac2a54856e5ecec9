#include "launcher/cli/commit_hook.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "config/config_text.h"
#include "launcher/cli/supervise.h"
#include "launcher/control.h"
#include "launcher/environment.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// What waits for a disk that does not answer cannot be killed, and the run does not wait for it.
constexpr double kKillSeconds = 2;
// A shorter wait at the run's end is not logged.
constexpr double kQuietSeconds = 1;

// "step_00000100 1790000000.123456789": name of the checkpoint, and when its manifest was written. A step
// that is repeated and saved again is another checkpoint. "" if it does not exist.
std::string identity(const std::string& checkpoint) {
  struct stat info {};
  if (checkpoint.empty() || stat((checkpoint + "/" + kManifestName).c_str(), &info) != 0) return "";
  return fmt::format("{} {}.{:09}", fs::path(checkpoint).filename().string(), info.st_mtim.tv_sec,
                     info.st_mtim.tv_nsec);
}

std::string name_of_identity(const std::string& identity) {
  return identity.substr(0, identity.find(' '));
}

std::vector<std::string> arguments(const std::vector<std::string>& command, const std::string& checkpoint) {
  const std::string directory = fs::absolute(checkpoint).lexically_normal().string();
  std::vector<std::string> out = command;
  for (std::string& one : out)
    for (size_t at = 0; (at = one.find("{}", at)) != std::string::npos; at += directory.size())
      one.replace(at, 2, directory);
  return out;
}

}  // namespace

void require_hook(const CheckpointConfig& config) {
  if (config.on_commit.empty() || can_execute(config.on_commit.front())) return;
  throw Error(Exit::kDoesNotFit,
              {.area = "HOOK-39",
               .what = "checkpoint.on_commit names a program that was not found or cannot be executed",
               .place = config.on_commit.front(),
               .next = "give its path, or leave checkpoint.on_commit out"});
}

CommitHook::CommitHook(const CheckpointConfig& config, std::string directory)
    : config_(config), own_(std::move(directory) + "/on_commit") {
  if (config_.on_commit.empty()) return;
  log_to_file(fs::path(own_).parent_path().string() + "/log.txt");
  std::error_code error;
  fs::create_directory(own_, error);
  if (fs::exists(own_ + "/done", error)) handled_ = read_small_file(own_ + "/done", 4096);
}

CommitHook::~CommitHook() {
  if (busy()) kill_group();
}

void CommitHook::kill_group() {
  kill(-process_, SIGKILL);  // its children, too
  kill(process_, SIGKILL);   // if it has not led its group yet
  const double until = monotonic_seconds() + kKillSeconds;
  while (waitpid(process_, nullptr, WNOHANG) == 0 && monotonic_seconds() < until) poll(nullptr, 0, 10);
  process_ = -1;
}

bool CommitHook::due(const std::string& checkpoint) const {
  const std::string now = identity(checkpoint);
  return !config_.on_commit.empty() && !now.empty() && now != handled_;
}

void CommitHook::start(const std::string& checkpoint) {
  handled_ = current_ = identity(checkpoint);
  const int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int out = open((own_ + "/log.txt").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const int reason = errno;
  if (in >= 0 && out >= 0) {
    process_ = start_program({.argv = arguments(config_.on_commit, checkpoint),
                              .stop_signals = StopSignals::kDefault,
                              .own_group = true},
                             {in, out, out});
    until_ = monotonic_seconds() + static_cast<double>(config_.on_commit_limit.seconds);
  } else {
    process_ = -reason;
  }
  for (const int fd : {in, out}) {
    if (fd >= 0) close(fd);
  }
  if (process_ < 0) fail(std::string("it cannot be started: ") + std::strerror(-process_));
}

void CommitHook::fail(const std::string& why) {
  process_ = -1;
  failure_ = why + " for " + name_of_identity(current_);
  log_warning("HOOK-39", "checkpoint.on_commit: " + config_.on_commit.front() + ": " + failure_ +
                             "; training continues, and the next checkpoint tries again (" + own_ +
                             "/log.txt has its output)");
}

// Reaps the command, or kills it at its limit.
void CommitHook::end_if_due() {
  int status = 0;
  if (!busy()) return;
  if (waitpid(process_, &status, WNOHANG) != process_) {
    if (monotonic_seconds() < until_) return;
    kill_group();
    return fail("killed after checkpoint.on_commit_limit = " + value_text(config_.on_commit_limit));
  }
  if (WIFSIGNALED(status)) return fail("ended by " + signal_name(WTERMSIG(status)));
  if (WEXITSTATUS(status) != 0) return fail(fmt::format("exit code {}", WEXITSTATUS(status)));
  process_ = -1;
  failure_.clear();
  try {
    atomic_write_file(own_ + "/done", current_);
  } catch (const Error& error) {
    log_warning("HOOK-39", std::string(error.what()) + "; the next start passes this checkpoint on again");
  }
}

void CommitHook::look(const std::string& checkpoint) {
  end_if_due();
  if (!busy() && due(checkpoint)) start(checkpoint);
}

void CommitHook::finish(const std::string& checkpoint) {
  const double begin = monotonic_seconds();
  bool told = false;
  for (look(checkpoint); busy(); look(checkpoint)) {
    if (stop_signal_came()) {
      kill_group();
      return fail("killed by a stop signal");
    }
    if (!told && monotonic_seconds() - begin >= kQuietSeconds) {
      log_line("waiting for checkpoint.on_commit of " + name_of_identity(current_) + ", at most " +
               seconds_text(config_.on_commit_limit.seconds));
      told = true;
    }
    poll(nullptr, 0, 10);
  }
}

void finish_hook(const CheckedRun& run, CommitHook& hook, RunStatus& status) {
  hook.finish(status.checkpoint);
  status.on_commit = hook.failure();
  if (status.on_commit.empty()) return;
  try {
    write_status(run.directory, status);
  } catch (const Error& error) {
    log_error(error);
  }
}

}  // namespace lm
