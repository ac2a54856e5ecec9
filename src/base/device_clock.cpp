#include "base/device_clock.h"

#include <utility>

#include "base/error.h"

namespace lm {

DeviceClock::DeviceClock(StreamView stream, Trace* trace)
    : trace_(trace), known_(std::make_unique<TimingEvent>(stream.device)) {
  known_->record(stream);
  known_->synchronize();
  known_ns_ = steady_ns();
}

std::unique_ptr<TimingEvent> DeviceClock::take() {
  if (free_.empty()) return std::make_unique<TimingEvent>(DeviceType::kCuda);
  std::unique_ptr<TimingEvent> event = std::move(free_.back());
  free_.pop_back();
  return event;
}

int64_t DeviceClock::begin_named(Kind kind, StreamView stream, int64_t bytes, std::string name) {
  spans_.push_back({kind, std::move(name), bytes, false, take(), take()});
  spans_.back().first->record(stream);
  if (kind == Kind::kToDevice) to_device_bytes_ += bytes;
  if (kind == Kind::kFromDevice) from_device_bytes_ += bytes;
  return collected_ + std::ssize(spans_) - 1;
}

void DeviceClock::end(int64_t span, StreamView stream) {
  Span& s = spans_.at(static_cast<size_t>(span - collected_));
  s.last->record(stream);
  s.ended = true;
}

void DeviceClock::add(const Span& span, int64_t start_ns, int64_t end_ns) {
  const double seconds = span.last->seconds_since(*span.first);
  constexpr double kShownWait = 2e-6;  // a shorter one is the cost of the two events
  TraceRow row = TraceRow::kGpuCompute;
  switch (span.kind) {
    case Kind::kCompute:
      break;
    case Kind::kKernel:
      row = TraceRow::kGpuKernels;
      break;
    case Kind::kStall:
      stall_seconds_ += seconds;
      if (seconds < kShownWait) return;
      break;
    case Kind::kToDevice:
      copy_seconds_ += seconds;
      row = TraceRow::kToGpu;
      break;
    case Kind::kFromDevice:
      copy_seconds_ += seconds;
      row = TraceRow::kFromGpu;
      break;
  }
  if (trace_ != nullptr && !span.name.empty()) trace_->add(row, span.name, start_ns, end_ns, span.bytes);
}

void DeviceClock::collect() {
  const auto host_ns = [&](const TimingEvent& event) {
    return known_ns_ + static_cast<int64_t>(event.seconds_since(*known_) * 1e9);
  };
  const size_t used = spans_.size();
  // In the order in which they began; an unfinished span leaves the ones after it to the next call.
  while (!spans_.empty() && spans_.front().ended && spans_.front().last->done()) {
    Span& span = spans_.front();
    const int64_t start_ns = host_ns(*span.first), end_ns = host_ns(*span.last);
    add(span, start_ns, end_ns);
    free_.push_back(std::move(span.first));
    free_.push_back(std::exchange(known_, std::move(span.last)));
    known_ns_ = end_ns;
    spans_.pop_front();
    ++collected_;
  }
  if (std::exchange(begun_, true)) return;
  // A step may begin before all of the last one's spans are over: room for two of them, and then some.
  for (size_t i = free_.size(); i < 6 * used; ++i)
    free_.push_back(std::make_unique<TimingEvent>(DeviceType::kCuda));
}

}  // namespace lm
