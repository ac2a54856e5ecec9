// An asynchronous save of the state after a step that overlaps with the next step. State is lent to a thread
// of this object, which writes it to the sink in parallel with the step's compute, in one of two ways. State
// that nothing changes before the step's check is lent in place from the start of the save until that check.
// Offloaded state is lent during the step from its slot, so that it needs no extra read: a tile of optimizer
// state after its deferred update, weights at the unit's first use. If neither holds (a step without global
// clipping, tiles in slots without a pending update) everything is read before the step. Every byte is
// written to the sink once, from at most two threads at a time.
//
// With several ranks each saves its shards. Weights are read after their all_gather, which may write the
// whole unit: the save's stream begins after the step's all_gathers in flight, and a unit's first use waits
// for its own. Later ones start after wait_beside, or into a slot after take_back. So the save waits only for
// all_gathers that this rank has already enqueued, and for no rank that waits for this one.
//
// Constructed and called by the compute thread; TrainStep drives it during the step. Borrows everything.
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
  // TrainStep's description of the state after its last step.
  struct State {
    WeightStore& weights;
    const ShardedOptimizer& optimizer;
    StreamView stream;   // of compute
    StreamView gathers;  // the stream of weights' all_gathers: a group's, or the same
    std::span<const ScheduleUnit> units;
    bool rides;    // overlaps with the next step; else all slots are empty, and everything is read now
    bool pending;  // that step begins with deferred updates of offloaded state; else its slots are empty
    int64_t step = 0, updates = 0;  // the step, and the update count including all of its updates
  };

  // Reads the state that must be read now; throws the sink's errors.
  StepSave(const StepSaveSetup& setup, const State& state);
  ~StepSave();  // drops state not yet written
  StepSave(const StepSave&) = delete;
  StepSave& operator=(const StepSave&) = delete;

  // Called by TrainStep: none of them throws the sink's errors; a failure ends the save, and finish() throws
  // it. The tile has just had that step's update.
  void updated(int64_t unit, int64_t tile, int64_t step);
  // The unit is on loan, and its updated weights are ready for compute.
  void used(int64_t unit, const std::byte* weights);
  // The array's slot is about to be reused: waits until the sink has everything lent from it.
  void take_back(Pool pool, int64_t array);
  // Waits for all lent state; afterwards all memory may change.
  void wait_beside();
  // Slots are empty and deferred updates are done: reads the weights that have not been used.
  void flushed();

  // Whether missing state needs a step or a flush; otherwise the save completes by itself.
  bool needs_step() const;
  // Whether everything has been written and committed, or has failed.
  bool ended() const;
  // Waits for that; only valid if no step is needed.
  void wait();
  // Waits, and throws the first failure.
  void finish();
  // Time that the compute thread worked for this save or waited for it.
  double compute_seconds() const { return compute_seconds_; }

 private:
  using Entries = std::span<const StateEntry>;
  using Slot = std::pair<Pool, int64_t>;  // the slot with this array
  struct Lent {
    std::optional<Slot> slot;  // nullopt: memory that does not change until the next check
    const StateEntry* entry;
    int64_t offset;
    std::span<const std::byte> bytes;
    std::shared_ptr<Event> made;  // for GPU memory: after it the bytes are complete
  };
  void take_in();
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes);
  void read(LiveState& live, Entries entries);
  void lend(const Lent& lent);
  void lend_tile(Entries entries, int64_t block, int64_t tile);
  void lend_weights(Entries entries, const std::byte* weights);
  // The unit's weights have been lent.
  void came(int64_t unit);
  // An event after compute's work enqueued so far; null on the CPU.
  std::shared_ptr<Event> made() const;
  void try_on_compute(const std::function<void()>& body);
  void wait_until(const std::function<bool()>& condition);
  void fail();
  // Run by the save's thread.
  void run();
  void hand_on(Staging& staging, std::unique_lock<std::mutex>& lock);

  const StepSaveSetup setup_;
  const State state_;
  std::vector<Entries> weights_, optimizer_;  // per unit, still to be lent during the step
  double compute_seconds_ = 0;

  Stream stream_;  // on a GPU the thread has its own stream
  int gpu_ = 0;    // the thread's device

  std::atomic<bool> given_up_{false};  // write nothing more
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t expected_ = 0;                 // units whose weights are still to be lent during the step
  std::deque<Lent> in_slots_, lasting_;  // not yet in the sink: in slots, and in lasting memory
  // Writes in flight from memory that is lent until the check. Used by the thread while anything is lent.
  std::vector<StateSink::Write> writes_;
  bool ended_ = false;
  std::exception_ptr failure_;  // the first
  std::thread thread_;
};

}  // namespace lm
