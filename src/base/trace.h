// A trace of a few steps: spans of compute and of transfers, written once as JSON for Perfetto and
// chrome://tracing. Any thread may add spans. Traced code holds a pointer, usually null: untraced, a span
// costs that comparison. Times are steady-clock nanoseconds. With a GPU the compute row shows when work was
// enqueued, and separate rows when it was executed (base/device_clock.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"

namespace lm {

enum class TraceRow : uint8_t { kCompute, kReads, kWrites, kGpuCompute, kGpuKernels, kToGpu, kFromGpu };

class Trace {
 public:
  // Records steps `first` to `last`. Throws Error(20, 21) if no file can be created at `path`; the file
  // appears only once it is complete.
  Trace(std::string path, int64_t first, int64_t last);

  // Starts step `step`. The step after the last one writes the file.
  void begin_step(int64_t step);
  bool recording() const { return recording_; }
  // Dropped while nothing is recorded. Concurrent transfers share their row: each is drawn from the end of
  // the one that finished before it, with its whole duration as an attribute.
  void add(TraceRow row, std::string name, int64_t start_ns, int64_t end_ns, int64_t bytes = 0);
  // Ends the recording and writes it, unless that is done. A failure is a warning: training continues.
  void write();

 private:
  struct Span {
    TraceRow row;
    std::string name;
    int64_t start_ns, end_ns, bytes;
  };
  std::string text();

  const std::string path_;
  const int64_t first_, last_;
  std::atomic<bool> recording_ = false;
  bool written_ = false;
  std::mutex mutex_;  // guards spans_
  std::vector<Span> spans_;
};

}  // namespace lm
