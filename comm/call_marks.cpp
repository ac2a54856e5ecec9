#include "comm/call_marks.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// Of an event that the driver says has failed nobody knows; the compute thread is told by its own calls.
bool passed(const Event& event) {
  try {
    return event.done();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::optional<int> awaited(const CallMark& mine, std::span<const CallMark> all) {
  const auto last = std::ranges::min_element(all, {}, &CallMark::begun);
  if (!mine.inside() || last == all.end() || last->begun >= mine.begun) return std::nullopt;
  return static_cast<int>(last - all.begin());
}

CallMarks::CallMarks(DeviceType device, SharedRegion* region, int rank)
    : device_(device), region_(region), rank_(rank) {}

void CallMarks::begin(const char* what, StreamView stream) {
  std::optional<Call> call;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      call.emplace(std::move(spare_.back()));
      spare_.pop_back();
    }
  }
  if (!call) call.emplace(Call{Event(device_), Event(device_), {}});
  call->begun.record(stream);
  call->what = what;
  call->enqueued = false;
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(*call));
  ++mark_.enqueued;
}

void CallMarks::end(StreamView stream) {
  Call* call = nullptr;
  {
    const std::lock_guard lock(mutex_);
    call = &calls_.back();
  }
  call->done.record(stream);
  const std::lock_guard lock(mutex_);
  call->enqueued = true;
}

CallMarks::Call* CallMarks::under_way(size_t i) {
  const std::lock_guard lock(mutex_);
  return i < calls_.size() && calls_[i].enqueued ? &calls_[i] : nullptr;
}

void CallMarks::look() {
  // They pass in order: of many, few are asked for.
  size_t done = 0, open = 0;
  {
    const std::lock_guard lock(mutex_);
    open = calls_.size();
  }
  while (done < open) {
    const size_t middle = done + (open - done) / 2;
    const Call* const call = under_way(middle);
    if (call != nullptr && passed(call->done)) {
      done = middle + 1;
    } else {
      open = middle;
    }
  }
  Event* next = nullptr;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < done; ++i) {
      spare_.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
    mark_.done += done;
    if (!calls_.empty()) next = &calls_.front().begun;
  }
  const bool inside = next != nullptr && passed(*next);
  const std::lock_guard lock(mutex_);
  mark_.begun = mark_.done + (inside ? 1 : 0);
  if (region_ != nullptr) region_->mark_calls(rank_, mark_);
}

CallMark CallMarks::latest() const {
  const std::lock_guard lock(mutex_);
  return mark_;
}

std::vector<CallMark> CallMarks::all() const {
  std::vector<CallMark> out;
  for (int r = 0; region_ != nullptr && r < region_->ranks(); ++r) out.push_back(region_->calls(r));
  return out;
}

bool CallMarks::waits() const {
  const CallMark mine = latest();
  return mine.inside() && (region_ == nullptr || awaited(mine, all()));
}

DeviceStand CallMarks::stand() const {
  CallMark mine;
  std::string next;
  bool whole = true;
  {
    const std::lock_guard lock(mutex_);
    mine = mark_;
    if (!calls_.empty()) whole = calls_.front().enqueued;
    if (!calls_.empty()) next = fmt::format("call {}, \"{}\"", mine.done + 1, calls_.front().what);
  }
  const auto stand = [&](const std::string& where) {
    return DeviceStand{.passed = mine.begun + mine.done, .inside = mine.inside(), .where = where};
  };
  if (mine.enqueued == mine.done)
    return stand(fmt::format("has done all {} calls that were enqueued", mine.done));
  if (!mine.inside()) return stand(fmt::format("has done call {} and does not come to {}", mine.done, next));
  if (region_ == nullptr) return stand(fmt::format("waits in {}, for others", next));
  const std::vector<CallMark> marks = all();
  const std::optional<int> late = awaited(mine, marks);
  if (!late && !whole)
    return stand(fmt::format("has done call {}, and its host is held while it enqueues {}", mine.done, next));
  if (!late) return stand(fmt::format("does not end {}, to which all have come", next));
  const CallMark& theirs = marks[static_cast<size_t>(*late)];
  return stand(fmt::format("waits in {}, for rank {}, whose GPU has done {} of {} that were enqueued there",
                           next, *late, theirs.done, theirs.enqueued));
}

}  // namespace lm
