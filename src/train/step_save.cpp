#include "train/step_save.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "train/live_state.h"
#include "train/step.h"

namespace lm {
namespace {

// Ends the thread's walk through memory; no failure of its own.
struct GivenUp {};

}  // namespace

// Counts the compute thread's time.
class StepSave::Busy {
 public:
  explicit Busy(StepSave& save) : save_(save), start_(monotonic_seconds()) {}
  ~Busy() { save_.compute_seconds_ += monotonic_seconds() - start_; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  StepSave& save_;
  double start_;
};

StepSave::StepSave(const StepSaveSetup& setup, State state)
    : setup_(setup),
      state_(std::move(state)),
      weights_(state_.units.size()),
      optimizer_(state_.units.size()),
      next_tile_(state_.units.size()),
      came_(state_.units.size(), 0),
      stream_(state_.stream.device),
      begins_(state_.stream.device),
      gathered_(state_.stream.device) {
  const Busy busy(*this);
  take_in();
  begins_.record(state_.stream);
  gathered_.record(state_.gathers);
  if (state_.stream.device == DeviceType::kCuda) gpu_ = cuda_selected();
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& refused) {
    throw Error(Exit::kHostMemory, {.area = "CKPT-03",
                                    .what = std::string("cannot start the save's thread: ") + refused.what(),
                                    .place = "",
                                    .next = "raise the limits on processes (ulimit -u) and memory"});
  }
}

// What comes when; what must be read now is.
void StepSave::take_in() {
  const StateCatalogue& catalogue = setup_.catalogue;
  LiveState live(state_.weights, state_.optimizer, state_.stream);
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
    const bool weights = first.state == StateClass::kWeights;
    (weights ? weights_ : optimizer_)[u] = entries;
    const SaveUnit& unit = state_.units[u];
    next_tile_[u] = unit.first_tile;
    if (unit.way == SaveWay::kNow) {
      read(live, entries);
    } else if (unit.way == SaveWay::kBeside || (unit.way == SaveWay::kLoan && !weights)) {
      beside_.push_back(entries);
    } else if (weights) {
      ++expected_;
    }
  }
}

StepSave::~StepSave() {
  {
    const std::lock_guard lock(mutex_);
    // With everything there the commit goes on.
    if (expected_ > 0) given_up_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepSave::write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
  setup_.sink.write(entry, offset, bytes);
}

void StepSave::read(LiveState& from, Entries entries) {
  from.read(entries, [&](const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
    write(entry, offset, bytes);
  });
}

// Slots are in demand: what is lent from them comes first, and finds few writes before its own.
void StepSave::read_beside(Staging& staging) {
  constexpr size_t kAhead = 8;
  LiveState live(state_.weights, state_.optimizer, stream_.view(), kThreadStaging);
  Writes writes;
  const auto take = [&](const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
    for (size_t done = 0; done < bytes.size(); done += kSaveBuffer) {
      const std::span<const std::byte> piece =
          bytes.subspan(done, std::min<size_t>(kSaveBuffer, bytes.size() - done));
      const int64_t at = offset + static_cast<int64_t>(done);
      {
        std::unique_lock lock(mutex_);
        while (!lent_.empty() && !given_up_) hand_on_lent(staging, lock);
      }
      if (given_up_) throw GivenUp();
      live.lasting() ? setup_.sink.lend(entry, at, piece, writes) : write(entry, at, piece);
      const size_t over = writes.size() - std::min(writes.size(), kAhead);
      setup_.sink.wait(std::span(writes).first(over));
      writes.erase(writes.begin(), writes.begin() + static_cast<std::ptrdiff_t>(over));
    }
  };
  for (const Entries& entries : beside_) live.read(entries, take);
  setup_.sink.wait(writes);
}

// The oldest, without the lock.
void StepSave::hand_on_lent(Staging& staging, std::unique_lock<std::mutex>& lock) {
  const Lent lent = lent_.front();
  lent_.pop_front();
  lock.unlock();
  Writes writes;
  if (lent.made) {
    lent.made->wait(stream_.view());
    staging.read(lent.bytes.data(), std::ssize(lent.bytes),
                 [&](int64_t offset, std::span<const std::byte> bytes) {
                   write(*lent.entry, lent.offset + offset, bytes);
                 });
  } else if (lent.lender == kUntilCheck) {
    setup_.sink.lend(*lent.entry, lent.offset, lent.bytes, writes);
  } else {
    write(*lent.entry, lent.offset, lent.bytes);
  }
  lock.lock();
  writes_.insert(writes_.end(), writes.begin(), writes.end());
  if (--owing_[lent.lender] == 0) owing_.erase(lent.lender);
  changed_.notify_all();
}

void StepSave::run() {
  try {
    if (state_.stream.device == DeviceType::kCuda) cuda_select(gpu_);
    begins_.wait(stream_.view());
    gathered_.wait(stream_.view());
    Staging staging(stream_.view(), kThreadStaging);
    read_beside(staging);
    std::unique_lock lock(mutex_);
    beside_done_ = true;
    changed_.notify_all();
    while (!given_up_ && (expected_ > 0 || !lent_.empty())) {
      lent_.empty() ? changed_.wait(lock) : hand_on_lent(staging, lock);
    }
    lock.unlock();
    if (!given_up_) setup_.complete();
  } catch (const GivenUp&) {
  } catch (...) {
    fail();
  }
  const std::lock_guard lock(mutex_);
  beside_done_ = ended_ = true;
  changed_.notify_all();
}

// With the exception at hand.
void StepSave::fail() {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
  given_up_ = true;
  changed_.notify_all();
}

void StepSave::try_on_compute(const std::function<void()>& body) {
  if (given_up_) return;
  const Busy busy(*this);
  try {
    body();
  } catch (...) {
    fail();
  }
}

// Slots are few, and needed long before a disk has what they hold: a copy frees them. On the CPU all threads
// of compute make it together: a copying thread beside them would take a core from one of them, and the
// others would wait for that one. (benchmarks/save.py, state on disk: a save makes a step of 5 s 0.25 s
// longer. With a copying thread it is 0.4 s; without copies the compute thread waits 1.2 s for slots.)
void StepSave::lend(const Lent& lent) {
  if (lent.lender != kUntilCheck && state_.stream.device == DeviceType::kCpu)
    return setup_.sink.write_by(state_.stream.threads, *lent.entry, lent.offset, lent.bytes);
  const std::lock_guard lock(mutex_);
  lent_.push_back(lent);
  ++owing_[lent.lender];
  changed_.notify_all();
}

std::shared_ptr<Event> StepSave::made(StreamView stream) {
  if (stream.device == DeviceType::kCpu) return nullptr;
  auto event = std::make_shared<Event>(stream.device);
  event->record(stream);
  return event;
}

void StepSave::take_back(Pool pool, int64_t array) {
  const Lender lender{pool, array};
  std::unique_lock lock(mutex_);
  if (!owing_.contains(lender)) return;
  const Busy busy(*this);
  changed_.wait(lock, [&] { return !owing_.contains(lender) || ended_; });
}

void StepSave::came(int64_t unit) {
  came_[static_cast<size_t>(unit)] = 1;
  const std::lock_guard lock(mutex_);
  --expected_;
  changed_.notify_all();
}

bool StepSave::waits_for(int64_t unit, SaveWay way) const {
  const auto u = static_cast<size_t>(unit);
  return state_.units[u].way == way && came_[u] == 0 && !weights_[u].empty();
}

void StepSave::updated(int64_t unit, int64_t tile, int64_t step) {
  const auto u = static_cast<size_t>(unit);
  if (!waits_for(unit, SaveWay::kUpdate)) return;
  try_on_compute([&] {
    LM_CHECK(
        step == state_.step && state_.optimizer->t() == state_.updates && tile == next_tile_[u],
        fmt::format("tile {} of unit {} is of step {}, the save of step {}", tile, unit, step, state_.step));
    ++next_tile_[u];
    lend_tile(unit, tile);
    if (tile + 1 < state_.units[u].end_tile || state_.units[u].gathered) return;
    lend_updated_weights(unit, state_.stream);
  });
}

void StepSave::gathered(int64_t unit) {
  if (!waits_for(unit, SaveWay::kUpdate)) return;
  try_on_compute([&] { lend_updated_weights(unit, state_.gathers); });
}

// Of several ranks each has its shard to save.
void StepSave::lend_tile(int64_t unit, int64_t tile) {
  const Entries entries = optimizer_[static_cast<size_t>(unit)];
  const int64_t block = state_.weights.units()[static_cast<size_t>(unit)].block;
  const std::optional<int64_t> array = state_.optimizer->array(block, tile);
  const Lender lender = array ? Lender{Pool::kOptimizer, *array} : kUntilCheck;
  const std::shared_ptr<Event> made =
      state_.optimizer->shows_host_memory(block, tile) ? nullptr : StepSave::made(state_.stream);
  state_.optimizer->show(block, tile, [&](size_t stream, int64_t offset, std::span<const std::byte> bytes) {
    const auto entry = std::ranges::find(entries, stream, &StateEntry::stream);
    if (entry == entries.end()) return;
    const int64_t begin = entry->first * static_cast<int64_t>(dtype_size(entry->dtype));
    const int64_t from = std::max(begin, offset);
    const int64_t to = std::min(begin + entry->bytes(), offset + std::ssize(bytes));
    if (from >= to) return;
    lend({.lender = lender,
          .entry = &*entry,
          .offset = from - begin,
          .bytes = bytes.subspan(static_cast<size_t>(from - offset), static_cast<size_t>(to - from)),
          .made = made});
  });
}

// Those of an adapter are on the device, and those in shards have been changed at home.
void StepSave::lend_updated_weights(int64_t unit, StreamView stream) {
  const bool slot = state_.weights.trained_through_slots(unit) && !state_.weights.in_shards(unit);
  lend_weights(unit, state_.weights.trainable_home(unit), slot ? Lender{Pool::kWeights, unit} : kUntilCheck,
               stream);
}

void StepSave::lend_weights(int64_t unit, const std::byte* weights, Lender lender, StreamView stream) {
  const auto u = static_cast<size_t>(unit);
  const std::shared_ptr<Event> made = StepSave::made(stream);
  for (const StateEntry& entry : weights_[u]) {
    const int64_t begin = entry.first - state_.weights.units()[u].first;
    lend({.lender = lender,
          .entry = &entry,
          .offset = 0,
          .bytes = {weights + begin * static_cast<int64_t>(dtype_size(entry.dtype)),
                    static_cast<size_t>(entry.bytes())},
          .made = made});
  }
  came(unit);
}

void StepSave::returning(int64_t unit, const Loan& loan) {
  if (!waits_for(unit, SaveWay::kLoan)) return;
  try_on_compute([&] { lend_weights(unit, loan.trainable(), {Pool::kWeights, unit}, state_.stream); });
}

void StepSave::wait_beside() {
  Writes writes;
  {
    const Busy busy(*this);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return (beside_done_ && owing_.empty()) || ended_; });
    std::swap(writes, writes_);
  }
  try_on_compute([&] { setup_.sink.wait(writes); });
}

void StepSave::flushed() {
  wait_beside();
  try_on_compute([&] {
    LiveState live(state_.weights, state_.optimizer, state_.stream);
    for (int64_t u = 0; u < std::ssize(state_.units); ++u) {
      if (!waits_for(u, SaveWay::kLoan)) continue;
      read(live, weights_[static_cast<size_t>(u)]);
      came(u);
    }
    LM_CHECK(expected_ == 0, fmt::format("{} units have not been updated", expected_));
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
  const Busy busy(*this);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_; });
}

void StepSave::finish() {
  wait();
  if (failure_) std::rethrow_exception(failure_);
}

SaveWay TrainStep::save_way(int64_t unit, bool rides) const {
  if (!rides) return SaveWay::kNow;
  if (config_.deferred(unit)) return lists_.pending() ? SaveWay::kUpdate : SaveWay::kNow;
  // Tiles pass through slots, which the compute thread fills meanwhile.
  if (config_.unit(unit).off_device) return SaveWay::kNow;
  const bool frozen = weights_.units()[static_cast<size_t>(unit)].frozen_bytes > 0;
  return weights_.through_slots(unit) && !frozen ? SaveWay::kLoan : SaveWay::kBeside;
}

std::unique_ptr<StepSave> TrainStep::begin_save(const StepSaveSetup& setup) {
  // Without global clipping the next updates come before any check.
  const bool rides = config_.clip == Clip::kGlobal && !(lists_.pending() && update_.skipped);
  std::vector<SaveUnit> units;
  for (int64_t u = 0; u < std::ssize(config_.units); ++u) {
    const ScheduleUnit& unit = config_.unit(u);
    units.push_back({.way = save_way(u, rides),
                     .first_tile = unit.first_tile,
                     .end_tile = unit.end_tile,
                     .gathered = config_.sharded && !unit.in_shards});
  }
  if (std::ranges::find(units, SaveWay::kNow, &SaveUnit::way) != units.end()) flush();
  auto save = std::make_unique<StepSave>(
      setup, StepSave::State{.weights = weights_,
                             .optimizer = optimizer_,
                             .stream = context_.stream,
                             .gathers = device_group_.stream(context_.stream),
                             .units = std::move(units),
                             .step = update_.step,
                             .updates = optimizer_->t() + (lists_.pending() && !update_begun_ ? 1 : 0)});
  save_ = save.get();
  return save;
}

}  // namespace lm
