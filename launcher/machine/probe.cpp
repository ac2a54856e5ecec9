#include "launcher/machine/probe.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <sstream>

#include "base/clock.h"

namespace lm {

std::optional<std::string> program_output(const Program& program, int timeout_ms) {
  const double end = monotonic_seconds() + timeout_ms / 1e3;
  const ProgramResult result = run_program(program, "", {}, [end] { return monotonic_seconds() >= end; });
  return result.status == 0 ? std::optional(result.output) : std::nullopt;
}

int io_uring_errno() {
  constexpr unsigned kEntries = 33;  // entries of a save's ring: kernels that charge its memory may refuse it
  std::array<uint32_t, 30> parameters{};  // struct io_uring_params: 120 bytes, zero on entry
  const long fd = syscall(SYS_io_uring_setup, kEntries, parameters.data());
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
  // The loader lists the libraries, and exits without running the program.
  const std::string list =
      program_output({.argv = {executable}, .variables = {"LD_TRACE_LOADED_OBJECTS=1"}}, 10000).value_or("");
  std::vector<std::string> out;
  std::istringstream lines(list);
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
