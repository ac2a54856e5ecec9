#include "launcher/child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "launcher/environment.h"

namespace lm {
namespace {

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

// Between fork and exec: only calls that are safe there. Reports errno through `report` and ends.
[[noreturn]] void become(const ChildCommand& command, char* const* argv, char* const* envp, pid_t parent,
                         int report) {
  // A rank must not outlive its door. The parent may have died before prctl: then it is not our parent any
  // more.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(static_cast<int>(Exit::kPeerLost));
  for (int signal : kStopSignals) std::signal(signal, command.ignores_stop_signals ? SIG_IGN : SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int fd : command.keep_fds) fcntl(fd, F_SETFD, 0);
  execve(argv[0], argv, envp);
  const int reason = errno;
  [[maybe_unused]] const ssize_t n = write(report, &reason, sizeof reason);
  _exit(127);
}

}  // namespace

pid_t start_child(const ChildCommand& command) {
  std::vector<std::string> arguments = {command.executable};
  arguments.insert(arguments.end(), command.arguments.begin(), command.arguments.end());
  std::vector<std::string> environment = rank_environment();
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  const auto refuse = [&](int reason) {
    return Error(Exit::kDoesNotFit, {.area = "RUN-33",
                                     .what = std::string("cannot start the rank: ") + std::strerror(reason),
                                     .place = command.executable,
                                     .next = "build it again, or see `lmlaunch doctor`",
                                     .kept = ""});
  };
  int report[2];  // closed by a successful exec
  if (pipe2(report, O_CLOEXEC) != 0) throw refuse(errno);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) become(command, argv.data(), envp.data(), parent, report[1]);
  const int fork_error = errno;
  close(report[1]);
  int reason = 0;
  ssize_t n = 0;
  if (child > 0) {
    do n = read(report[0], &reason, sizeof reason);
    while (n < 0 && errno == EINTR);
  }
  close(report[0]);
  if (child < 0) throw refuse(fork_error);
  if (n == static_cast<ssize_t>(sizeof reason)) {
    waitpid(child, nullptr, 0);
    throw refuse(reason);
  }
  return child;
}

std::string beside_this_program(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = error ? "" : (self.parent_path() / name).string();
  return !path.empty() && access(path.c_str(), X_OK) == 0 ? path : "";
}

}  // namespace lm
