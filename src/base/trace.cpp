#include "base/trace.h"

#include <fmt/format.h>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

namespace lm {
namespace {

using Object = nlohmann::ordered_json;

constexpr const char* kRows[] = {"compute",     "disk reads", "disk writes", "GPU compute",
                                 "GPU kernels", "to GPU",     "from GPU"};
constexpr int kRowCount = 7, kRowsAlways = 3;

double microseconds(int64_t ns) {
  return static_cast<double>(ns) / 1e3;
}

}  // namespace

Trace::Trace(std::string path, int64_t first, int64_t last)
    : path_(std::move(path)), first_(first), last_(last) {
  const NewFile trial(path_);
}

void Trace::begin_step(int64_t step) {
  if (step > last_) return write();
  recording_ = step >= first_;
}

void Trace::add(TraceRow row, std::string name, int64_t start_ns, int64_t end_ns, int64_t bytes) {
  if (!recording_) return;
  const std::lock_guard lock(mutex_);
  spans_.push_back({row, std::move(name), start_ns, end_ns, bytes});
}

void Trace::write() {
  recording_ = false;
  if (std::exchange(written_, true)) return;
  const std::lock_guard lock(mutex_);
  try {
    atomic_write_file(path_, text());
    log_line(fmt::format("trace: {} spans of steps {} to {} in {}", spans_.size(), first_, last_, path_));
  } catch (const Error& error) {
    log_warning("TRACE-05", std::string("no trace was written: ") + error.what());
  }
  spans_ = {};
}

std::string Trace::text() {
  std::stable_sort(spans_.begin(), spans_.end(),
                   [](const Span& a, const Span& b) { return a.end_ns < b.end_ns; });
  int64_t zero = INT64_MAX;
  int rows = kRowsAlways;
  for (const Span& span : spans_) {
    zero = std::min(zero, span.start_ns);
    if (static_cast<int>(span.row) >= rows) rows = kRowCount;
  }
  Object events = Object::array();
  for (int row = 0; row < rows; ++row) {
    events.push_back({{"ph", "M"},
                      {"pid", 1},
                      {"tid", row + 1},
                      {"name", "thread_name"},
                      {"args", {{"name", kRows[row]}}}});
  }
  int64_t until[kRowCount];  // where the row's last span ends
  std::fill(std::begin(until), std::end(until), INT64_MIN);
  for (const Span& span : spans_) {
    int64_t& free_from = until[static_cast<size_t>(span.row)];
    const int64_t start = std::max(span.start_ns, free_from);
    free_from = span.end_ns;
    Object event = {{"ph", "X"},
                    {"pid", 1},
                    {"tid", static_cast<int>(span.row) + 1},
                    {"name", span.name},
                    {"ts", microseconds(start - zero)},
                    {"dur", microseconds(span.end_ns - start)}};
    if (span.bytes > 0) {
      event["args"] = {{"bytes", span.bytes}, {"under_way_us", microseconds(span.end_ns - span.start_ns)}};
    }
    events.push_back(std::move(event));
  }
  return Object{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump(
      -1, ' ', false, Object::error_handler_t::replace);
}

}  // namespace lm
