#include "launcher/cli/end_launcher.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <fstream>
#include <string>

namespace lm {
namespace {

// An mpirun that reaches its machines has ended them and itself in about one second.
constexpr int kAloneMs = 2000;
// On the first signal mpirun ends its machines, on the second it reports that it is doing so, on the third it
// exits.
constexpr int kRequests = 3, kBetweenMs = 300;

bool is_mpirun(pid_t process) {
  static constexpr std::array kNames = {"mpirun", "mpiexec", "orterun", "mpirun.openmpi", "mpiexec.openmpi"};
  std::string name;
  std::getline(std::ifstream(fmt::format("/proc/{}/comm", process)), name);
  return std::ranges::find(kNames, name) != kNames.end();
}

// Whether the process that `handle` refers to has ended within that time.
bool has_ended(int handle, int milliseconds) {
  pollfd one{handle, POLLIN, 0};
  return poll(&one, 1, milliseconds) > 0;
}

void request(int handle, int signal) {
  syscall(SYS_pidfd_send_signal, handle, signal, nullptr, 0);
}

}  // namespace

void end_mpirun_later() {
  const pid_t launcher = getppid();
  // A pidfd keeps referring to its process; a pid may be reused.
  const auto handle = static_cast<int>(syscall(SYS_pidfd_open, launcher, 0));
  if (handle < 0) return;
  if (getppid() != launcher || !is_mpirun(launcher) || fork() != 0) {
    close(handle);
    return;
  }
  setsid();  // mpirun kills the process groups that it has started
  // mpirun waits until nobody can write to its pipes.
  if (handle > 0) close_range(0, static_cast<unsigned>(handle) - 1, 0);
  close_range(static_cast<unsigned>(handle) + 1, ~0U, 0);
  bool ended = has_ended(handle, kAloneMs);
  for (int i = 0; i < kRequests && !ended; ++i) {
    request(handle, SIGTERM);
    ended = has_ended(handle, kBetweenMs);
  }
  if (!ended) request(handle, SIGKILL);
  _exit(0);
}

}  // namespace lm
