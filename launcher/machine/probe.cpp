#include "launcher/machine/probe.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <sstream>

namespace lm {
namespace {

constexpr size_t kMostOutput = 1 << 20;

int64_t now_ms() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// Reads until the end of the output or of the time; false at the latter.
bool read_all(int fd, int timeout_ms, std::string* out) {
  const int64_t deadline = now_ms() + timeout_ms;
  for (;;) {
    pollfd wait{fd, POLLIN, 0};
    const int64_t left = deadline - now_ms();
    if (left <= 0 || poll(&wait, 1, static_cast<int>(left)) == 0) return false;
    char buffer[4096];
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return true;
    if (out->size() < kMostOutput) out->append(buffer, static_cast<size_t>(n));
  }
}

}  // namespace

ProgramOutput run_program(const std::vector<std::string>& argv, const std::vector<std::string>& extra,
                          int timeout_ms) {
  ProgramOutput out;
  std::vector<char*> arguments, environment;
  for (const std::string& text : argv) arguments.push_back(const_cast<char*>(text.c_str()));
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  for (const std::string& text : extra) environment.push_back(const_cast<char*>(text.c_str()));
  arguments.push_back(nullptr);
  environment.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return out;
  const pid_t child = fork();
  if (child == 0) {
    const int null = open("/dev/null", O_RDWR);
    dup2(null, 0);
    dup2(ends[1], 1);
    dup2(null, 2);
    execve(arguments[0], arguments.data(), environment.data());
    _exit(127);
  }
  close(ends[1]);
  if (child > 0) {
    if (!read_all(ends[0], timeout_ms, &out.text)) kill(child, SIGKILL);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    out.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  close(ends[0]);
  return out;
}

int io_uring_errno() {
  std::array<uint32_t, 30> parameters{};  // struct io_uring_params: 120 bytes, zero on entry
  const long fd = syscall(SYS_io_uring_setup, 4, parameters.data());
  if (fd < 0) return errno;
  close(static_cast<int>(fd));
  return 0;
}

int64_t memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX));
}

int64_t free_disk_bytes(const std::string& directory) {
  struct statvfs info {};
  if (statvfs(directory.c_str(), &info) != 0) return 0;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

std::vector<std::string> missing_libraries(const std::string& executable) {
  // The loader lists what it would load, and leaves without running the program.
  const ProgramOutput list = run_program({executable}, {"LD_TRACE_LOADED_OBJECTS=1"}, 10000);
  std::vector<std::string> out;
  std::istringstream lines(list.text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("not found") == std::string::npos) continue;
    std::istringstream words(line);
    std::string name;
    words >> name;
    out.push_back(name);
  }
  return out;
}

}  // namespace lm
