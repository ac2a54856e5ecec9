// Small queries of the system for `doctor`: a program's output, io_uring, limits, free space. Each call is
// independent; any thread, but not while another forks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/process.h"

namespace lm {

// Runs a program and returns its standard output; empty if it cannot be run, fails or exceeds the time.
std::optional<std::string> program_output(const Program& program, int timeout_ms);

// 0 if io_uring works here, else errno (EPERM in most containers, ENOSYS on old kernels).
int io_uring_errno();

// Soft limit on pinned memory for io_uring and others; -1: unlimited.
int64_t memlock_limit();

int64_t free_disk_bytes(const std::string& directory);

// Shared libraries that `executable` needs and the loader does not find.
std::vector<std::string> missing_libraries(const std::string& executable);

}  // namespace lm
