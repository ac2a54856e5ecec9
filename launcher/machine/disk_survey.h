// The disks of offload.paths: whether they can be used, their free space, and their rates. Rates are measured
// once and cached for a week in the user's cache, by device, path and engine. Any one thread calls.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "plan/machine.h"
#include "plan/plan.h"

namespace lm {

// Throws Error(12) for a path of offload.paths that does not exist, is in memory (tmpfs, ramfs), or cannot
// hold anonymous files, and Error(10) if io.engine names an engine that this machine refuses and `purpose`
// may use it: training always does, as it writes checkpoints. Writes nothing.
void check_disks(const Config& config, PlanPurpose purpose);

// With io.engine = "auto": why io_uring is not used, in one line; "" if it is.
std::string ring_refusal(const Config& config);

enum class DiskRates : uint8_t { kCached, kMeasured };

// Paths on one disk share its space and its rates. kMeasured: measures a disk whose rates are not cached,
// which takes some 2 s and prints a line; a rate that cannot be measured stays 0. A path that does not exist
// has no space. `cache_dir` is the user's ("": nothing is cached).
std::vector<Disk> survey_disks(const Config& config, const std::string& cache_dir, DiskRates rates);

}  // namespace lm
