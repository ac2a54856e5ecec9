// A save of the state after a step that rides on the step after it. State is lent to a thread of this object,
// which hands it to the sink beside the step's compute, in one of two ways. What nothing changes before the
// step's check is lent where it lies when the save begins, until that check. What is off the device comes
// with the step, from the slot in which it lies then, so that it needs no read of its own: a tile of
// optimizer state after its deferred update, weights at the unit's first use. Where neither holds (a step
// without global clipping, tiles in slots without an update to come) all is read before the step. Every byte
// goes to the sink once, from two threads at a time.
//
// Of several ranks each saves its shards. Weights are read behind their gather, which may write all of a
// unit: the save's stream begins behind the gathers that the step has left under way, and a unit's first use
// waits for its own. The next ones come after wait_beside, or into a slot after take_back. So the save waits
// for gathers that this rank has enqueued already, and for no rank that waits for this one.
//
// The compute thread constructs it and calls; TrainStep gives it the step. Borrows everything.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/cuda.h"
#include "optim/sharded_optimizer.h"
#include "plan/state_catalogue.h"
#include "schedule/schedule.h"
#include "weights/loans.h"

namespace lm {

class LiveState;

struct StepSaveSetup {
  const StateCatalogue& catalogue;
  StateSink& sink;
  // Called on the thread of the save once the sink has every byte: the commit.
  std::function<void()> complete;
};

class StepSave {
 public:
  // What TrainStep says of the state after its last step.
  struct State {
    WeightStore& weights;
    const ShardedOptimizer& optimizer;
    StreamView stream;   // of compute
    StreamView gathers;  // in which weights are gathered: a group's, or the same
    std::span<const ScheduleUnit> units;
    bool rides;    // on the next step; else all slots are empty, and everything is read now
    bool pending;  // that step begins with updates of what is off the device; else its slots are empty
    int64_t step = 0, updates = 0;  // the step, and updates when all of its are done
  };

  // Reads what must be read now; throws what the sink does.
  StepSave(const StepSaveSetup& setup, const State& state);
  ~StepSave();  // what has not come by now is given up
  StepSave(const StepSave&) = delete;
  StepSave& operator=(const StepSave&) = delete;

  // TrainStep's: none of them throws for the sink, whose failure ends the save and waits for finish().
  // The tile has just been updated, by the update of that step.
  void updated(int64_t unit, int64_t tile, int64_t step);
  // The unit is on loan, and its updated weights are there for compute.
  void used(int64_t unit, const std::byte* weights);
  // The slot that holds the array is about to hold another one: waits until the sink has what was lent from
  // it.
  void take_back(Pool pool, int64_t array);
  // Afterwards all memory may change.
  void wait_beside();
  // Slots are empty and what was deferred is done: weights that have not been used are read.
  void flushed();

  // Whether a step or a flush has to bring what is missing; the rest comes by itself.
  bool needs_step() const;
  // Whether everything has been written and committed, or has failed.
  bool ended() const;
  // Waits for that, which comes only where it needs no step.
  void wait();
  // Waits, and throws the first failure.
  void finish();
  // In which the compute thread worked for this save or waited for it.
  double compute_seconds() const { return compute_seconds_; }

 private:
  using Entries = std::span<const StateEntry>;
  using Slot = std::pair<Pool, int64_t>;  // that holds this array
  struct Lent {
    std::optional<Slot> slot;  // none: memory that stays as it is until the next check
    const StateEntry* entry;
    int64_t offset;
    std::span<const std::byte> bytes;
    std::shared_ptr<Event> made;  // of memory of a GPU: after which it has them
  };
  void take_in();
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes);
  void read(LiveState& live, Entries entries);
  void lend(const Lent& lent);
  void lend_tile(Entries entries, int64_t block, int64_t tile);
  void lend_weights(Entries entries, const std::byte* weights);
  // With its weights a unit has come.
  void came(int64_t unit);
  // Of what compute's stream has been given so far; null on the CPU.
  std::shared_ptr<Event> made() const;
  void try_on_compute(const std::function<void()>& body);
  void wait_until(const std::function<bool()>& condition);
  void fail();
  // The thread.
  void run();
  void hand_on(Staging& staging, std::unique_lock<std::mutex>& lock);

  const StepSaveSetup setup_;
  const State state_;
  std::vector<Entries> weights_, optimizer_;  // of each unit, that come with the step and have not yet
  double compute_seconds_ = 0;

  Stream stream_;  // beside a GPU's compute the thread has its own
  int gpu_ = 0;    // that it selects

  std::atomic<bool> given_up_{false};  // no byte more
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t expected_ = 0;                 // units whose weights still have to come with the step
  std::deque<Lent> in_slots_, lasting_;  // that the sink does not have yet, by where they lie
  // Under way, from memory that is lent until the check. Of the thread while anything is lent.
  std::vector<StateSink::Write> writes_;
  bool ended_ = false;
  std::exception_ptr failure_;  // the first
  std::thread thread_;
};

}  // namespace lm
