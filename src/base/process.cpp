#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>

#include "base/bytes.h"

namespace lm {
namespace {

constexpr int64_t kMaxOutput = 32 * kMiB;
constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

struct Fd {
  Fd() = default;
  explicit Fd(int number) : fd(number) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  void reset() {
    if (fd >= 0) close(fd);
    fd = -1;
  }
  int fd = -1;
};

struct Pipe {
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    read.fd = ends[0];
    write.fd = ends[1];
  }
  Fd read, write;
};

// Kills and reaps whatever still runs when the scope is left.
struct Reaper {
  pid_t pid;
  bool done = false;
  // Whether it has ended; then `status` is as waitpid reports it.
  bool ended(int& status) {
    done = waitpid(pid, &status, WNOHANG) == pid;
    return done;
  }
  int wait() {
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    done = true;
    return status;
  }
  ~Reaper() {
    if (done) return;
    kill(pid, SIGKILL);
    wait();
  }
};

void add_pointers(const std::vector<std::string>& texts, std::vector<char*>& out) {
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
}

// Between fork and exec: only calls that are safe after the fork of a process with threads. Reports errno
// through `report`, which a successful exec closes.
[[noreturn]] void become(const Program& program, const Streams& streams, char* const* argv, char* const* envp,
                         pid_t parent, int report) {
  // The parent may have died before prctl: then it is not our parent any more.
  if (program.own_session) {
    setsid();
  } else {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    if (program.own_group) setpgid(0, 0);
  }
  if (program.stop_signals != StopSignals::kAsHere) {
    const bool ignored = program.stop_signals == StopSignals::kIgnored;
    for (const int signal : kStopSignals) std::signal(signal, ignored ? SIG_IGN : SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
  }
  for (const int fd : program.keep_fds) fcntl(fd, F_SETFD, 0);
  const int given[] = {streams.in, streams.out, streams.err};
  bool ready = true;
  for (int i = 0; i < 3; ++i) ready = ready && (given[i] < 0 || dup2(given[i], i) >= 0);
  if (ready) execvpe(argv[0], argv, envp);
  const int reason = errno;
  [[maybe_unused]] const ssize_t n = write(report, &reason, sizeof reason);
  _exit(127);
}

// A file in memory that holds the child's input: unlike a pipe it cannot block either side. -1 with errno.
int input_file(const std::string& input) {
  const int fd = memfd_create("lmlaunch-request", MFD_CLOEXEC);
  size_t done = 0;
  while (fd >= 0 && done < input.size()) {
    const ssize_t put = write(fd, input.data() + done, input.size() - done);
    if (put < 0 && errno != EINTR) break;
    if (put > 0) done += static_cast<size_t>(put);
  }
  if (fd < 0 || (done == input.size() && lseek(fd, 0, SEEK_SET) == 0)) return fd;
  close(fd);
  return -1;
}

void relay_lines(std::string& pending, const std::function<void(const std::string&)>& on_line, bool last) {
  for (size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
    if (on_line) on_line(pending.substr(0, end));
  }
  if (last && !pending.empty() && on_line) on_line(pending);
}

// One read of what poll reported.
void read_some(Fd& from, std::string& to) {
  std::array<char, 65536> buffer;
  const ssize_t got = read(from.fd, buffer.data(), buffer.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) return from.reset();
  to.append(buffer.data(), static_cast<size_t>(got));
}

}  // namespace

pid_t start_program(const Program& program, const Streams& streams) {
  std::vector<char*> argv, envp;
  add_pointers(program.argv, argv);
  add_pointers(program.environment, envp);
  for (char** own = environ; program.environment.empty() && *own != nullptr; ++own) envp.push_back(*own);
  add_pointers(program.variables, envp);
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  Pipe report;
  if (report.read.fd < 0) return -errno;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) become(program, streams, argv.data(), envp.data(), parent, report.write.fd);
  if (child < 0) return -errno;
  report.write.reset();
  int reason = 0;  // closed by a successful exec
  ssize_t n = 0;
  do n = read(report.read.fd, &reason, sizeof reason);
  while (n < 0 && errno == EINTR);
  if (n != static_cast<ssize_t>(sizeof reason)) return child;
  waitpid(child, nullptr, 0);
  return -reason;
}

ProgramResult run_program(const Program& program, const std::string& input,
                          const std::function<void(const std::string&)>& on_error_line,
                          const std::function<bool()>& stopped) {
  ProgramResult result;
  const Fd in(input_file(input));
  Pipe out, err;
  if (in.fd < 0 || out.read.fd < 0 || err.read.fd < 0) {
    result.error = errno;
    return result;
  }
  const pid_t pid = start_program(program, {in.fd, out.write.fd, err.write.fd});
  if (pid < 0) {
    result.error = -pid;
    return result;
  }
  Reaper child{pid};
  out.write.reset();
  err.write.reset();
  std::string lines;
  while (out.read.fd >= 0 || err.read.fd >= 0) {
    std::array<pollfd, 2> waits{{{out.read.fd, POLLIN, 0}, {err.read.fd, POLLIN, 0}}};
    if (poll(waits.data(), waits.size(), 100) < 0 && errno != EINTR) break;
    if (waits[0].revents != 0) read_some(out.read, result.output);
    if (waits[1].revents != 0) read_some(err.read, lines);
    relay_lines(lines, on_error_line, false);
    result.stopped = stopped && stopped();
    const size_t most = std::max(result.output.size(), lines.size());
    if (result.stopped || static_cast<int64_t>(most) > kMaxOutput) break;
  }
  relay_lines(lines, on_error_line, true);
  if (out.read.fd >= 0 || err.read.fd >= 0) return result;
  // It may have closed both and still run.
  int status = -1;
  while (stopped && !child.ended(status)) {
    result.stopped = stopped();
    if (result.stopped) return result;
    poll(nullptr, 0, 1);
  }
  result.status = child.done ? status : child.wait();
  return result;
}

std::string beside_this_program(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = error ? "" : (self.parent_path() / name).string();
  return !path.empty() && access(path.c_str(), X_OK) == 0 ? path : "";
}

}  // namespace lm
