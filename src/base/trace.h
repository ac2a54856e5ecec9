// Where the time of a few steps goes: spans of compute and of transfers, written once as JSON that Perfetto
// and chrome://tracing open. Any thread may add spans. Code that may be traced holds a pointer, null as a
// rule: untraced, a span costs that comparison. Times are steady-clock nanoseconds. With a GPU the compute
// row shows when work was handed to it, and rows of its own when it was done (base/device_clock.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace lm {

enum class TraceRow : uint8_t { kCompute, kReads, kWrites, kGpuCompute, kToGpu, kFromGpu };

inline int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Trace {
 public:
  // Records steps `first` to `last`. Throws Error(20, 21) where a file cannot be made at `path`; there is
  // none before it is complete.
  Trace(std::string path, int64_t first, int64_t last);

  // From here on is step `step`. The one after the last writes the file.
  void begin_step(int64_t step);
  bool recording() const { return recording_; }
  // Dropped while nothing is recorded. Transfers under way at once share their row: each is shown from where
  // the one that ended before it left off, with its whole time beside it.
  void add(TraceRow row, std::string name, int64_t start_ns, int64_t end_ns, int64_t bytes = 0);
  // Ends the recording and writes it, unless that has happened. A failure is a warning: training goes on.
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
