// Measures the bandwidth of the disk behind a directory in about a second, with the engine, the queue and the
// swap space that training uses, on scratch space that leaves nothing behind. Any one thread calls it.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "offload/engines.h"

namespace lm {

struct DiskProbe {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double both_bytes_per_s = 0;  // reads and writes together, both counted
  int64_t measured_bytes = 0;   // the space that was read and written; a small one is less accurate
  bool direct = false;
  std::string direct_reason;  // why not
  std::string engine;         // with its settings
  std::string note;           // why this engine, where another one was preferred
  int64_t alignment = 0;
  int64_t free_bytes = 0;  // before the probe
};

// Uses at most `most_bytes` of disk and a quarter of what is free. Throws as SwapSpace and IoQueue do.
DiskProbe probe_disk(const std::string& directory, IoEngineKind engine = IoEngineKind::kAuto,
                     int64_t most_bytes = 256 * kMiB);

}  // namespace lm
