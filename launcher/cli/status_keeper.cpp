#include "launcher/cli/status_keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>

#include "launcher/cli/supervise.h"
#include "launcher/status.h"

namespace lm {
namespace {

// Large ranks take long to return their memory; after this time the lock's holder is stuck in the kernel.
constexpr int kLooks = 3000, kLookMs = 20;

// The record in a run's lock; "": none.
std::string owner_of(int lock) {
  char text[2048];
  const ssize_t n = pread(lock, text, sizeof text, 0);
  return {text, static_cast<size_t>(n > 0 ? n : 0)};
}

bool take(int lock) {
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(lock, F_OFD_SETLK, &whole) == 0;
}

// Closes the files inherited from the CLI process: their other ends would keep waiting.
void leave_all_but(int handle) {
  if (handle > 0) close_range(0, static_cast<unsigned>(handle) - 1, 0);
  close_range(static_cast<unsigned>(handle) + 1, ~0U, 0);
  for (int i = 0; i < 3; ++i) open("/dev/null", O_RDWR);  // a print must not go into a file
}

int open_lock(const std::string& directory) {
  return open((directory + "/.lock").c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
}

std::string recorded_owner(const std::string& directory) {
  const int lock = open_lock(directory);
  std::string out = owner_of(lock);
  if (lock >= 0) close(lock);
  return out;
}

void keep(const CheckedRun& run, const Control& control, pid_t cli, int handle, const std::string& owner) {
  prctl(PR_SET_NAME, "lm-status");
  setsid();  // signals of mpirun, a terminal or a shell's `kill` go to the CLI's group
  leave_all_but(handle);
  if (chdir("/") != 0) return;
  const int lock = open_lock(run.directory);
  pollfd one{handle, POLLIN, 0};
  while (poll(&one, 1, -1) < 0) {
  }
  for (int i = 0; i < kLooks && owner_of(lock) == owner && !owner.empty(); ++i) {
    const std::optional<RunStatus> status = read_status(run.directory);
    if (!status || status->state != "running") return;
    if (!take(lock)) {
      poll(nullptr, 0, kLookMs);
      continue;
    }
    if (owner_of(lock) != owner) return;  // another run has used the directory in the meantime
    RunStatus last = status_of_killed(control);
    last.pid = cli;
    last.ranks = status->ranks;
    last.ranks_asked = status->ranks_asked;
    LiveReport report(run.directory);
    return record_end(run, last, report);
  }
}

}  // namespace

StatusKeeper::StatusKeeper(const CheckedRun& run, const Control& control) {
  const pid_t cli = getpid();
  const auto handle = static_cast<int>(syscall(SYS_pidfd_open, cli, 0));
  if (handle < 0) return;
  CheckedRun whole = run;
  whole.directory = std::filesystem::absolute(run.directory);
  // Read here: the new process may run for the first time when another run has the directory.
  const std::string owner = recorded_owner(whole.directory);
  process_ = fork();
  if (process_ == 0) {
    keep(whole, control, cli, handle, owner);
    _exit(0);
  }
  close(handle);
}

StatusKeeper::~StatusKeeper() {
  if (process_ < 0) return;
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
}

}  // namespace lm
