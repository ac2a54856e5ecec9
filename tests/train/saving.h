// Saves of a test's run that ride on its steps (train/step_save.h): a sink that sees that every byte comes
// once, and two runs side by side, one of them saved after every step.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "offloaded_run.h"

namespace lm::saving {

using namespace offloaded_run;
using Bytes = std::map<std::string, std::vector<std::byte>>;

// Takes every byte of a catalogue once.
class Memory : public StateSink {
 public:
  explicit Memory(const StateCatalogue& catalogue) {
    for (const StateEntry& entry : catalogue) {
      std::vector<std::byte>& bytes = bytes_[entry.name];
      const auto end = static_cast<size_t>(entry.bytes() + begin(entry));
      bytes.resize(std::max(bytes.size(), end));
      std::vector<char>& seen = seen_[entry.name];
      seen.resize(bytes.size(), 1);  // what other ranks have does not come
      std::fill_n(seen.begin() + begin(entry), entry.bytes(), char{0});
    }
  }
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) override {
    if (std::this_thread::get_id() != compute_)
      std::this_thread::sleep_for(delay_beside);
    else
      on_compute_ += std::ssize(bytes);
    const std::lock_guard lock(mutex_);
    if (writes_left-- == 0)
      throw Error(Exit::kNoSpace, {.area = "TEST", .what = "full", .place = "", .next = "", .kept = ""});
    const auto at = static_cast<size_t>(begin(entry) + offset);
    std::memcpy(bytes_.at(entry.name).data() + at, bytes.data(), bytes.size());
    const auto seen = std::span(seen_.at(entry.name)).subspan(at, bytes.size());
    EXPECT_EQ(std::ranges::count(seen, 1), 0) << entry.name << ": bytes come twice";
    std::ranges::fill(seen, 1);
  }
  // As a disk would: taken only later.
  void lend(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
            std::vector<Write>& writes) override {
    const std::lock_guard lock(lent_mutex_);
    writes.push_back(lent_.size());
    lent_.push_back([&entry, offset, bytes, this] { write(entry, offset, bytes); });
  }
  void wait(std::span<const Write> writes) override {
    for (const Write at : writes) take(at);
  }
  // What a file's end waits for.
  void take_all() {
    for (size_t at = 0; at < lent_.size(); ++at) take(at);  // nothing is lent any more
  }
  // All of them have come.
  const Bytes& whole() const {
    for (const auto& [name, seen] : seen_)
      EXPECT_EQ(std::ranges::count(seen, 0), 0) << name << ": bytes are missing";
    return bytes_;
  }

  // What the compute thread has brought so far.
  int64_t on_compute() const { return on_compute_; }

  std::chrono::microseconds delay_beside{0};  // of each write of the save's own thread
  int64_t writes_left = -1;                   // until one fails; -1: none does

 private:
  // Whoever comes second waits until the first has it.
  void take(size_t at) {
    const std::lock_guard lock(lent_mutex_);
    if (lent_[at]) std::exchange(lent_[at], nullptr)();
  }
  static int64_t begin(const StateEntry& entry) {
    return entry.first * static_cast<int64_t>(dtype_size(entry.dtype));
  }
  std::thread::id compute_ = std::this_thread::get_id();
  int64_t on_compute_ = 0;
  std::mutex mutex_;
  std::mutex lent_mutex_;
  std::vector<std::function<void()>> lent_;  // by number; empty: taken
  Bytes bytes_;
  std::map<std::string, std::vector<char>> seen_;
};

// A save in a test: of the state after the last step.
struct Saving {
  explicit Saving(Training& training, int64_t writes = -1, std::chrono::microseconds delay = {})
      : training(training), catalogue(training.catalogue()), memory(catalogue) {
    memory.writes_left = writes;
    memory.delay_beside = delay;
    save = training.train_step().begin_save({.catalogue = catalogue, .sink = memory, .complete = [this] {
                                               memory.take_all();
                                               committed = true;
                                             }});
  }
  ~Saving() { training.train_step().end_save(); }
  // The next step is done, or a flush.
  const Bytes& finish() {
    if (!save->needs_step()) save->finish();  // else it would wait for ever
    EXPECT_TRUE(committed);
    return memory.whole();
  }
  Training& training;
  StateCatalogue catalogue;
  Memory memory;
  std::atomic<bool> committed{false};
  std::unique_ptr<StepSave> save;
};

inline void expect_equal(const Bytes& got, const Bytes& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, bytes] : want) EXPECT_TRUE(got.at(name) == bytes) << name << " differs";
}

// Of two runs side by side one is saved after every step: each save has the bytes of a flush and a pass over
// everything after its step, and the runs agree to the end. `ranks`: of which this is one; `gpus`: the same,
// for what lies on their GPUs.
inline void expect_saves_unnoticed(const Variant& run, std::chrono::microseconds delay = {},
                                   Group* ranks = nullptr, Group* gpus = nullptr) {
  SCOPED_TRACE(run.text());
  Training plain(run, {}, {}, ranks, gpus), saved(run, {}, {}, ranks, gpus);
  // Nothing comes before the step but the number of updates, of which the first rank says how many.
  const bool rides = run.clip == Clip::kGlobal && !run.in_backward;
  const int64_t before = ranks == nullptr || ranks->rank() == 0 ? static_cast<int64_t>(sizeof(int64_t)) : 0;
  std::unique_ptr<Saving> saving;
  Bytes want;
  for (int64_t s = 1; s <= run.steps; ++s) {
    // First: what waits for one run's GPU waits for the other's.
    const StepResult a = plain.step(s);
    Bytes next = plain.state();
    const StepResult b = saved.step(s);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    if (saving != nullptr) {
      expect_equal(saving->finish(), want);
      saving.reset();
    }
    // A flush between: nothing is pending when the next save begins; or the one at hand is completed.
    if (s == 3) saved.flush();
    want = std::move(next);
    saving = std::make_unique<Saving>(saved, -1, delay);
    if (rides && s != 3) {
      EXPECT_EQ(saving->memory.on_compute(), before);
    }
    if (s == 5) {
      saved.flush();
      expect_equal(saving->finish(), want);
    }
  }
  saved.flush();
  expect_equal(saving->finish(), want);
  expect_equal(saved.state(), want);
}

}  // namespace lm::saving
