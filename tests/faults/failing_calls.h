// System calls of this process that fail when a test says so: the n-th call that concerns a file, in place of
// the C library's (failing_calls.cpp defines open, pread, fsync, ... of the executable). Counts from when a
// plan is set. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/sim_disk.h"

namespace lm::failing_calls {

// kEio, kEnospc, kEintr, kEagain; kShort: half of what was asked for, of calls that move bytes. `at` counts
// calls that the fault concerns, from 0.
void plan(SimFaultAt at);
// Calls work again; the number of calls that met the fault since `plan`.
int64_t stop();
// The first call that met it: "fsync".
std::string first();
// What makes names, and what makes them durable, since `plan` or since this was asked: "mkdir /a/b",
// "fsync /a".
std::vector<std::string> names_made();

}  // namespace lm::failing_calls
