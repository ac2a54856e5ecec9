// What --restarts N and --elastic make of a run's end: whether the run starts again, and with which ranks.
// Pure but for the note that it logs; one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launcher/status.h"

namespace lm {

// The ranks of one start.
struct StartWorkers {
  int count = 1;
  // With --elastic on GPUs: the GPU of each rank, as CUDA_VISIBLE_DEVICES names it. Empty: by place.
  std::vector<std::string> gpus = {};
  bool operator==(const StartWorkers&) const = default;
};

// The ends that --restarts N answers with another start: a lost or hanging rank, at most N times; and once
// the kernel's kill for want of memory, which may have been another process's fault. With --elastic also an
// error of a run one of whose GPUs is gone; the next start then has one rank for each GPU that is there. A
// rank that is killed before the first step of two starts in a row is left out, with its GPU. No start has
// more ranks than the first.
class Restarts {
 public:
  using AskGpus = std::function<std::vector<std::string>()>;  // by the names that StartWorkers::gpus has

  Restarts(int64_t most, bool elastic, StartWorkers first)
      : most_(most), elastic_(elastic), first_(std::move(first)), ranks_(first_) {}

  // Whether the run starts again after that end, with `ranks()`. `visible`: asks for the GPUs that are there
  // now; called only with --elastic on GPUs.
  bool again(const RunStatus& status, const AskGpus& visible);
  const StartWorkers& ranks() const { return ranks_; }
  int asked() const { return first_.count; }

 private:
  std::string change_ranks(const RunStatus& status, const std::vector<std::string>& there);

  int64_t most_, done_ = 0;
  bool elastic_;
  bool memory_ = false;                   // the kernel's kill has been answered
  StartWorkers first_, ranks_;            // of the first start, and of the latest or next
  int left_out_ = 0;                      // ranks that start no more, on the CPU
  std::vector<std::string> broken_ = {};  // GPUs of ranks that start no more
  std::optional<int> killed_early_;       // the rank that was killed before the last start's first step
};

}  // namespace lm
