// Measures how long a GPU computes, copies and waits: spans between two events in its streams. They begin and
// end as work is enqueued, and are read later, once the host has waited for that work anyway. Without a GPU
// there is no clock (a null pointer), and host clocks are right. One thread, which issues the work.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "base/trace.h"

namespace lm {

class DeviceClock {
 public:
  enum class Kind : uint8_t {
    kCompute,     // an operation in the compute stream; for the trace alone
    kKernel,      // a kernel of it; likewise
    kStall,       // compute waits for a transfer
    kToDevice,    // a copy
    kFromDevice,  // likewise
  };

  // Synchronises the GPU's time with the host's; waits for `stream` once. `trace` may be null.
  DeviceClock(StreamView stream, Trace* trace);

  // Between the two calls the span's work is enqueued in `stream`; spans of one stream may be nested. `name`
  // is called only while a trace is recorded.
  template <class Name>
  int64_t begin(Kind kind, StreamView stream, int64_t bytes, const Name& name) {
    return begin_named(kind, stream, bytes, recording() ? name() : std::string());
  }
  void end(int64_t span, StreamView stream);
  bool recording() const { return trace_ != nullptr && trace_->recording(); }

  // Reads the finished spans and adds them to the trace. Never waits. After the first call events are reused,
  // not created.
  void collect();
  // Sums of the collected spans.
  double stall_seconds() const { return stall_seconds_; }
  double copy_seconds() const { return copy_seconds_; }
  // Of all copies that were begun.
  int64_t to_device_bytes() const { return to_device_bytes_; }
  int64_t from_device_bytes() const { return from_device_bytes_; }

 private:
  struct Span {
    Kind kind;
    std::string name;
    int64_t bytes;
    bool ended;
    std::unique_ptr<TimingEvent> first, last;
  };
  int64_t begin_named(Kind kind, StreamView stream, int64_t bytes, std::string name);
  std::unique_ptr<TimingEvent> take();
  void add(const Span& span, int64_t start_ns, int64_t end_ns);

  Trace* trace_;
  std::vector<std::unique_ptr<TimingEvent>> free_;
  std::deque<Span> spans_;  // not yet collected
  int64_t collected_ = 0;   // number of spans_.front()
  bool begun_ = false;      // collect has been called
  // An event whose host time is known. It advances with the collected spans, since the time between two
  // events is a float: precise to a quarter of a millisecond after an hour.
  std::unique_ptr<TimingEvent> known_;
  int64_t known_ns_ = 0;
  double stall_seconds_ = 0, copy_seconds_ = 0;
  int64_t to_device_bytes_ = 0, from_device_bytes_ = 0;
};

}  // namespace lm
