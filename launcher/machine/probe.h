// Small questions to the system that `doctor` asks: a program's output, io_uring, limits, free space. Each
// call stands alone; any thread but not while another forks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

struct ProgramOutput {
  int code = -1;     // exit code; -1: could not be run, died of a signal or ran out of time
  std::string text;  // stdout, at most 1 MiB
};

// Runs argv[0] (a path) with this process's environment and `extra` ("NAME=value"), stdin and stderr closed.
ProgramOutput run_program(const std::vector<std::string>& argv, const std::vector<std::string>& extra,
                          int timeout_ms);

// 0 when io_uring works here, else errno (EPERM in most containers, ENOSYS on old kernels).
int io_uring_errno();

// Soft limit on pinned memory for io_uring and others; -1: unlimited.
int64_t memlock_limit();

int64_t free_disk_bytes(const std::string& directory);

// Shared libraries that `executable` needs and the loader does not find.
std::vector<std::string> missing_libraries(const std::string& executable);

}  // namespace lm
