#include "data/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kMaxOutput = 32 * kMiB;

[[noreturn]] void cannot_start(const std::string& program, int error) {
  throw Error(Exit::kConfig,
              {.area = "DATA-24",
               .what = std::string("cannot start Python for the data: ") + std::strerror(error),
               .place = program,
               .next = "set LMLAUNCH_PYTHON to a Python with requirements.txt installed",
               .kept = ""});
}

struct Fd {
  Fd() = default;
  explicit Fd(int number) : fd(number) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  void reset() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  int fd = -1;
};

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) cannot_start("pipe", errno);
    read.fd = ends[0];
    write.fd = ends[1];
  }
  Fd read, write;
};

// Kills and reaps whatever still runs when the scope is left.
struct Reaper {
  pid_t pid;
  bool done = false;
  int wait() {
    int status = 0;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    done = true;
    return status;
  }
  ~Reaper() {
    if (done) return;
    ::kill(pid, SIGKILL);
    wait();
  }
};

// A file in memory that holds the child's input: unlike a pipe it cannot block either side.
int input_file(const std::string& input) {
  const int fd = ::memfd_create("lmlaunch-request", MFD_CLOEXEC);
  size_t done = 0;
  while (fd >= 0 && done < input.size()) {
    const ssize_t put = ::write(fd, input.data() + done, input.size() - done);
    if (put < 0 && errno != EINTR) break;
    if (put > 0) done += static_cast<size_t>(put);
  }
  if (fd < 0 || done < input.size() || ::lseek(fd, 0, SEEK_SET) != 0) cannot_start("memfd", errno);
  return fd;
}

// Between fork and exec: only calls that are safe after the fork of a process with threads.
[[noreturn]] void become(char* const* argv, int in, int out, int err, int report, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent died before the line above
  if (::dup2(in, 0) >= 0 && ::dup2(out, 1) >= 0 && ::dup2(err, 2) >= 0) ::execvp(argv[0], argv);
  const int error = errno;
  if (::write(report, &error, sizeof error) < 0) ::_exit(126);
  ::_exit(127);
}

void relay_lines(std::string& pending, const std::function<void(const std::string&)>& on_line, bool last) {
  for (size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
    on_line(pending.substr(0, end));
  }
  if (last && !pending.empty()) on_line(pending);
}

// One read of what poll reported; false at the end of the stream.
bool read_some(Fd& from, std::string& to) {
  std::array<char, 65536> buffer;
  const ssize_t got = ::read(from.fd, buffer.data(), buffer.size());
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  to.append(buffer.data(), static_cast<size_t>(got));
  if (got == 0) from.reset();
  return got > 0;
}

}  // namespace

ChildResult run_child(const std::vector<std::string>& arguments, const std::string& input,
                      const std::function<void(const std::string&)>& on_error_line,
                      const std::function<bool()>& stopped) {
  LM_CHECK(!arguments.empty(), "a program");
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const Fd in(input_file(input));
  Pipe out, err, report;
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) cannot_start(arguments[0], errno);
  if (pid == 0) become(argv.data(), in.fd, out.write.fd, err.write.fd, report.write.fd, parent);
  Reaper child{pid};
  out.write.reset();
  err.write.reset();
  report.write.reset();
  int error = 0;  // closed without a word once the program runs
  if (::read(report.read.fd, &error, sizeof error) == sizeof error) cannot_start(arguments[0], error);

  ChildResult result;
  std::string lines;
  while (out.read.fd >= 0 || err.read.fd >= 0) {
    std::array<pollfd, 2> waits{{{out.read.fd, POLLIN, 0}, {err.read.fd, POLLIN, 0}}};
    if (::poll(waits.data(), waits.size(), 100) < 0 && errno != EINTR) break;
    if (waits[0].revents != 0) read_some(out.read, result.output);
    if (waits[1].revents != 0) read_some(err.read, lines);
    relay_lines(lines, on_error_line, false);
    if (stopped && stopped()) {
      throw Error(Exit::kStopped, {.area = "DATA-24",
                                   .what = "stopped while tokenising the data",
                                   .place = arguments[0],
                                   .next = "start again; tokenising begins anew",
                                   .kept = ""});
    }
    if (static_cast<int64_t>(result.output.size()) > kMaxOutput) break;
  }
  relay_lines(lines, on_error_line, true);
  if (out.read.fd < 0 && err.read.fd < 0)
    result.status = child.wait();
  else
    result.status = -1;
  return result;
}

}  // namespace lm
