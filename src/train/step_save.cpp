#include "train/step_save.h"

#include <fmt/format.h>
#include <algorithm>
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
      came_(state_.units.size(), 0) {
  const Busy busy(*this);
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
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& refused) {
    throw Error(Exit::kHostMemory, {.area = "CKPT-03",
                                    .what = std::string("cannot start the save's thread: ") + refused.what(),
                                    .place = "",
                                    .next = "raise the limits on processes (ulimit -u) and memory"});
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

void StepSave::read(LiveState& from, Entries entries, bool lasting) {
  from.read(entries, [&](const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
    if (given_up_) throw GivenUp();
    if (lasting && from.lasting()) return setup_.sink.write_lasting(entry, offset, bytes);
    write(entry, offset, bytes);
  });
}

void StepSave::run() {
  try {
    if (!beside_.empty()) {
      LiveState live(state_.weights, state_.optimizer, state_.stream);
      for (const Entries& entries : beside_) read(live, entries, true);
      setup_.sink.wait_lasting();
    }
    std::unique_lock lock(mutex_);
    beside_done_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return expected_ == 0 || given_up_; });
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
    write_tile(unit, tile);
    if (tile + 1 < state_.units[u].end_tile) return;
    write_weights(unit, state_.weights.trainable_home(unit));
    came(unit);
  });
}

void StepSave::write_tile(int64_t unit, int64_t tile) {
  const Entries entries = optimizer_[static_cast<size_t>(unit)];
  const int64_t block = state_.weights.units()[static_cast<size_t>(unit)].block;
  state_.optimizer->show(block, tile, [&](size_t stream, int64_t offset, std::span<const std::byte> bytes) {
    const auto entry = std::ranges::find(entries, stream, &StateEntry::stream);
    LM_CHECK(entry != entries.end(), fmt::format("stream {}", stream));
    write(*entry, offset - entry->first * static_cast<int64_t>(dtype_size(entry->dtype)), bytes);
  });
}

void StepSave::write_weights(int64_t unit, const std::byte* weights) {
  const StateEntry& entry = weights_[static_cast<size_t>(unit)].front();
  write(entry, 0, {weights, static_cast<size_t>(entry.bytes())});
}

void StepSave::returning(int64_t unit, const Loan& loan) {
  if (!waits_for(unit, SaveWay::kLoan)) return;
  try_on_compute([&] {
    write_weights(unit, loan.trainable());
    came(unit);
  });
}

void StepSave::wait_beside() {
  const Busy busy(*this);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return beside_done_; });
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
  if (settings_.shape.deferred(unit)) return pending_ ? SaveWay::kUpdate : SaveWay::kNow;
  // Tiles pass through slots, which the compute thread fills meanwhile.
  if (settings_.shape.unit(unit).off_device) return SaveWay::kNow;
  const bool frozen = weights_.units()[static_cast<size_t>(unit)].frozen_bytes > 0;
  return weights_.through_slots(unit) && !frozen ? SaveWay::kLoan : SaveWay::kBeside;
}

std::unique_ptr<StepSave> TrainStep::begin_save(const StepSaveSetup& setup) {
  // A GPU's memory is read on its stream. Without global clipping the next updates come before any check.
  const bool rides = context_.device == DeviceType::kCpu && settings_.clip == Clip::kGlobal &&
                     !(pending_ && update_.skipped);
  std::vector<SaveUnit> units;
  for (int64_t u = 0; u < std::ssize(settings_.shape.units); ++u) {
    const ScheduleUnit& unit = settings_.shape.unit(u);
    units.push_back({save_way(u, rides), unit.first_tile, unit.end_tile});
  }
  if (std::ranges::find(units, SaveWay::kNow, &SaveUnit::way) != units.end()) flush();
  auto save = std::make_unique<StepSave>(
      setup, StepSave::State{.weights = weights_,
                             .optimizer = optimizer_,
                             .stream = context_.stream,
                             .units = std::move(units),
                             .step = update_.step,
                             .updates = optimizer_->t() + (pending_ && !update_begun_ ? 1 : 0)});
  save_ = save.get();
  return save;
}

}  // namespace lm
