#include "comm/collective_trace.h"

#include <fmt/format.h>
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

void CollectiveTrace::begin(const char* what, StreamView stream) {
  std::optional<Enqueued> next;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      next.emplace(std::move(spare_.back()));
      spare_.pop_back();
    }
  }
  if (!next) next.emplace(Enqueued{Event(device_), Event(device_), {}});
  next->begun.record(stream);
  next->what = what;
  next->whole = false;
  const std::lock_guard lock(mutex_);
  open_.push_back(std::move(*next));
  ++progress_.enqueued;
}

void CollectiveTrace::end(StreamView stream) {
  Enqueued* last = nullptr;
  {
    const std::lock_guard lock(mutex_);
    last = &open_.back();
  }
  last->done.record(stream);
  const std::lock_guard lock(mutex_);
  last->whole = true;
}

// They pass in order.
void CollectiveTrace::look() {
  std::unique_lock lock(mutex_);
  const auto unlocked = [&lock](const Event& event) {
    lock.unlock();
    const bool is_passed = passed(event);
    lock.lock();
    return is_passed;
  };
  while (!open_.empty() && open_.front().whole && unlocked(open_.front().done)) {
    spare_.push_back(std::move(open_.front()));
    open_.pop_front();
    progress_.begun = ++progress_.done;
  }
  const bool inside = !open_.empty() && unlocked(open_.front().begun);
  progress_.begun = progress_.done + (inside ? 1 : 0);
  if (region_ != nullptr) region_->post_device(rank_, progress_);
}

DeviceProgress CollectiveTrace::latest() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

std::vector<DeviceProgress> CollectiveTrace::all() const {
  std::vector<DeviceProgress> out;
  for (int r = 0; region_ != nullptr && r < region_->ranks(); ++r) out.push_back(region_->peek(r).device);
  return out;
}

bool CollectiveTrace::waits() const {
  const DeviceProgress mine = latest();
  return mine.inside() && (region_ == nullptr || awaited(mine, all()));
}

DeviceStand CollectiveTrace::stand() const {
  DeviceProgress mine;
  std::string next;
  bool whole = true;
  {
    const std::lock_guard lock(mutex_);
    mine = progress_;
    if (!open_.empty()) {
      whole = open_.front().whole;
      next = CollectiveName{open_.front().what, mine.done + 1}.text();
    }
  }
  const auto stand = [&](const std::string& where) {
    return DeviceStand{.passed = mine.begun + mine.done, .inside = mine.inside(), .where = where};
  };
  if (mine.enqueued == mine.done) return stand(fmt::format("has completed all {} collectives", mine.done));
  if (!mine.inside())
    return stand(fmt::format("has completed collective {} and does not reach {}", mine.done, next));
  if (region_ == nullptr) return stand(fmt::format("waits in {} for other ranks", next));
  const std::vector<DeviceProgress> ranks = all();
  const std::optional<int> late = awaited(mine, ranks);
  if (!late && !whole)
    return stand(
        fmt::format("has completed collective {}; its host is blocked enqueuing {}", mine.done, next));
  if (!late) return stand(fmt::format("does not complete {}, which all ranks have entered", next));
  const DeviceProgress& theirs = ranks[static_cast<size_t>(*late)];
  return stand(fmt::format("waits in {} for rank {}, whose GPU has completed {} of {} enqueued there", next,
                           *late, theirs.done, theirs.enqueued));
}

}  // namespace lm
