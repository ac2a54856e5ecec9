#include "train/step_save.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "train/live_state.h"

namespace lm {

StepSave::StepSave(const StepSaveSetup& setup, const State& state)
    : setup_(setup),
      state_(state),
      weights_(state.units.size()),
      optimizer_(state.units.size()),
      stream_(state.stream.device) {
  const double start = monotonic_seconds();
  take_in();
  Event gathered(state_.stream.device);
  gathered.record(state_.gathers);
  gathered.wait(stream_.view());
  if (state_.stream.device == DeviceType::kCuda) gpu_ = cuda_selected();
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& refused) {
    throw Error(Exit::kHostMemory, {.area = "CKPT-03",
                                    .what = std::string("cannot start the save's thread: ") + refused.what(),
                                    .place = "",
                                    .next = "raise the limits on processes (ulimit -u) and memory"});
  }
  compute_seconds_ += monotonic_seconds() - start;
}

// Sorts the state: reads what must be read now, and lends what does not change until the check.
void StepSave::take_in() {
  const StateCatalogue& catalogue = setup_.catalogue;
  LiveState live(state_.weights, &state_.optimizer, state_.stream);
  for (size_t begin = 0, end = 0; begin < catalogue.size(); begin = end) {
    const StateEntry& first = catalogue[begin];
    while (end < catalogue.size() && catalogue[end].unit == first.unit && catalogue[end].state == first.state)
      ++end;
    const Entries entries{&catalogue[begin], end - begin};
    if (first.unit < 0) {
      write(first, 0, std::as_bytes(std::span(&state_.updates, 1)));
      continue;
    }
    const auto u = static_cast<size_t>(first.unit);
    const ScheduleUnit& unit = state_.units[u];
    const bool weights = first.state == StateClass::kWeights;
    // Tiles without a pending update are not read during the step, which fills their slots.
    const bool now = !state_.rides || (unit.off_device && !state_.pending);
    if (now) {
      read(live, entries);
    } else if (unit.off_device || (weights && state_.weights.trained_through_slots(first.unit))) {
      (weights ? weights_ : optimizer_)[u] = entries;
      expected_ += weights ? 1 : 0;
    } else if (weights) {
      lend_weights(entries, state_.weights.trainable_in_place(first.unit));
    } else {
      for (int64_t tile = 0; tile < state_.optimizer.tiles(unit.block); ++tile)
        lend_tile(entries, unit.block, tile);
    }
  }
}

StepSave::~StepSave() {
  {
    const std::lock_guard lock(mutex_);
    // If everything has been lent, the commit continues.
    if (expected_ > 0) given_up_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepSave::write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
  setup_.sink.write(entry, offset, bytes);
}

void StepSave::read(LiveState& live, Entries entries) {
  live.read(entries, [&](const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
    write(entry, offset, bytes);
  });
}

// Writes a piece of the oldest lent state, without the lock. It stays in its queue until the sink has all of
// it. Slots are scarce: state lent from them goes first, and few writes are queued ahead of it.
void StepSave::hand_on(Staging& staging, std::unique_lock<std::mutex>& lock) {
  constexpr size_t kAhead = 8;
  std::deque<Lent>& queue = in_slots_.empty() ? lasting_ : in_slots_;
  Lent& lent = queue.front();
  lock.unlock();
  const int64_t most = lent.made ? kSaveStaging : kSaveBuffer;
  const auto size = static_cast<size_t>(std::min(most, std::ssize(lent.bytes)));
  const std::span<const std::byte> piece = lent.bytes.first(size);
  if (lent.made) {
    lent.made->wait(stream_.view());
    staging.read(piece.data(), std::ssize(piece), [&](int64_t offset, std::span<const std::byte> bytes) {
      write(*lent.entry, lent.offset + offset, bytes);
    });
  } else if (lent.slot) {
    write(*lent.entry, lent.offset, piece);
  } else {
    setup_.sink.lend(*lent.entry, lent.offset, piece, writes_);
    const size_t over = writes_.size() - std::min(writes_.size(), kAhead);
    setup_.sink.wait(std::span(writes_).first(over));
    writes_.erase(writes_.begin(), writes_.begin() + static_cast<std::ptrdiff_t>(over));
  }
  lock.lock();
  lent.offset += std::ssize(piece);
  lent.bytes = lent.bytes.subspan(size);
  if (!lent.bytes.empty()) return;
  queue.pop_front();
  changed_.notify_all();
}

void StepSave::run() {
  try {
    if (state_.stream.device == DeviceType::kCuda) cuda_select(gpu_);
    Staging staging(stream_.view(), kSaveStaging);
    std::unique_lock lock(mutex_);
    while (!given_up_) {
      if (!in_slots_.empty() || !lasting_.empty()) {
        hand_on(staging, lock);
      } else if (expected_ > 0) {
        changed_.wait(lock);
      } else {
        break;
      }
    }
    lock.unlock();
    if (!given_up_) setup_.complete();
  } catch (...) {
    fail();
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// Called in a catch block.
void StepSave::fail() {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
  given_up_ = true;
  changed_.notify_all();
}

void StepSave::try_on_compute(const std::function<void()>& body) {
  if (given_up_) return;
  const double start = monotonic_seconds();
  try {
    body();
  } catch (...) {
    fail();
  }
  compute_seconds_ += monotonic_seconds() - start;
}

// Waits for the condition, or until the save has ended.
void StepSave::wait_until(const std::function<bool()>& condition) {
  const double start = monotonic_seconds();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || condition(); });
  compute_seconds_ += monotonic_seconds() - start;
}

// Slots are few, and needed long before a disk has written their bytes: a copy frees them. On the CPU all
// compute threads copy together: a separate copying thread would take a core from one of them, and the others
// would wait for that one. (benchmarks/save.py, state on disk: a save makes a step of 5 s 0.25 s longer. With
// a copying thread it is 0.4 s; without copies the compute thread waits 1.2 s for slots.)
void StepSave::lend(const Lent& lent) {
  if (lent.slot && state_.stream.device == DeviceType::kCpu)
    return setup_.sink.write_by(state_.stream.threads, *lent.entry, lent.offset, lent.bytes);
  const std::lock_guard lock(mutex_);
  (lent.slot ? in_slots_ : lasting_).push_back(lent);
  changed_.notify_all();
}

std::shared_ptr<Event> StepSave::made() const {
  if (state_.stream.device == DeviceType::kCpu) return nullptr;
  auto event = std::make_shared<Event>(state_.stream.device);
  event->record(state_.stream);
  return event;
}

void StepSave::take_back(Pool pool, int64_t array) {
  const std::optional<Slot> slot = Slot(pool, array);
  wait_until([&] { return std::ranges::find(in_slots_, slot, &Lent::slot) == in_slots_.end(); });
}

void StepSave::came(int64_t unit) {
  weights_[static_cast<size_t>(unit)] = {};
  optimizer_[static_cast<size_t>(unit)] = {};
  const std::lock_guard lock(mutex_);
  --expected_;
  changed_.notify_all();
}

void StepSave::updated(int64_t unit, int64_t tile, int64_t step) {
  const Entries entries = optimizer_[static_cast<size_t>(unit)];
  if (entries.empty()) return;
  try_on_compute([&] {
    LM_CHECK(
        step == state_.step && state_.optimizer.t() == state_.updates,
        fmt::format("tile {} of unit {} is of step {}, the save of step {}", tile, unit, step, state_.step));
    lend_tile(entries, state_.units[static_cast<size_t>(unit)].block, tile);
  });
}

// With several ranks each saves its shard.
void StepSave::lend_tile(Entries entries, int64_t block, int64_t tile) {
  const std::optional<int64_t> array = state_.optimizer.array(block, tile);
  const std::optional<Slot> slot = array ? std::optional(Slot(Pool::kOptimizer, *array)) : std::nullopt;
  const std::shared_ptr<Event> event = state_.optimizer.shows_host_memory(block, tile) ? nullptr : made();
  state_.optimizer.show(block, tile, [&](size_t stream, int64_t offset, std::span<const std::byte> bytes) {
    const auto entry = std::ranges::find(entries, stream, &StateEntry::stream);
    if (entry == entries.end()) return;
    const int64_t begin = entry->first * static_cast<int64_t>(dtype_size(entry->dtype));
    const int64_t from = std::max(begin, offset);
    const int64_t to = std::min(begin + entry->bytes(), offset + std::ssize(bytes));
    if (from >= to) return;
    lend({.slot = slot,
          .entry = &*entry,
          .offset = from - begin,
          .bytes = bytes.subspan(static_cast<size_t>(from - offset), static_cast<size_t>(to - from)),
          .made = event});
  });
}

void StepSave::used(int64_t unit, const std::byte* weights) {
  const Entries entries = weights_[static_cast<size_t>(unit)];
  if (entries.empty()) return;
  try_on_compute([&] {
    lend_weights(entries, weights);
    came(unit);
  });
}

// An adapter's weights are on the device.
void StepSave::lend_weights(Entries entries, const std::byte* weights) {
  const int64_t unit = entries.front().unit;
  const bool slot = state_.weights.trained_through_slots(unit);
  const std::shared_ptr<Event> event = made();
  for (const StateEntry& entry : entries) {
    const int64_t begin = entry.first - state_.weights.units()[static_cast<size_t>(unit)].first;
    lend({.slot = slot ? std::optional(Slot(Pool::kWeights, unit)) : std::nullopt,
          .entry = &entry,
          .offset = 0,
          .bytes = {weights + begin * static_cast<int64_t>(dtype_size(entry.dtype)),
                    static_cast<size_t>(entry.bytes())},
          .made = event});
  }
}

void StepSave::wait_beside() {
  wait_until([&] { return in_slots_.empty() && lasting_.empty(); });
  // On failure the memory may change under writes in flight: the file is never read.
  try_on_compute([&] { setup_.sink.wait(std::exchange(writes_, {})); });
}

void StepSave::flushed() {
  wait_beside();
  try_on_compute([&] {
    LiveState live(state_.weights, &state_.optimizer, state_.stream);
    for (int64_t u = 0; u < std::ssize(weights_); ++u) {
      if (weights_[static_cast<size_t>(u)].empty()) continue;
      read(live, weights_[static_cast<size_t>(u)]);
      came(u);
    }
  });
}

bool StepSave::needs_step() const {
  const std::lock_guard lock(mutex_);
  return expected_ > 0 && !given_up_;
}

bool StepSave::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void StepSave::wait() {
  wait_until([] { return false; });
}

void StepSave::finish() {
  wait();
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace lm
