// A save of the state after a step that rides on the step after it: what is off the device is lent right
// after its deferred update, by the slot in which it lies then, so that it needs no read of its own; what
// stays as it is until the next check is lent until then. A thread of this object hands both to the sink
// beside the next step's compute; on the CPU those of slots are handed over at once, by all threads of
// compute. What neither holds for is read at once. Every byte goes to the sink once, from two threads at a
// time.
//
// Of several ranks each saves its shards. GPUs gather weights beside compute, in a stream of their group, and
// a gather may write every byte of a unit, this rank's shard among them, until it is done. So the save's
// stream begins behind the gathers that the step has left under way, and weights that an update has changed
// are lent when their gather has been enqueued, to be read behind it. Weights in shards are gathered into
// slots alone: lent is the home, which only updates change, or a slot for which compute has waited. The
// gathers of the next updates come after wait_beside, as these updates do, and one into a slot after
// take_back. Both wait for gathers that this rank has enqueued already, and so for no rank that waits for
// this one.
//
// The compute thread constructs it and calls; TrainStep gives it the step. Borrows everything.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/cuda.h"
#include "optim/sharded_optimizer.h"
#include "plan/state_catalogue.h"
#include "schedule/schedule.h"
#include "weights/loans.h"

namespace lm {

class LiveState;

// How a unit's state comes.
enum class SaveWay : uint8_t {
  kNow,     // read before the next step, from its home
  kBeside,  // memory that does not change before the next step's check
  kUpdate,  // tile by tile after its deferred update
  kLoan,    // the same as kBeside, but for weights that pass through a slot: at the end of their first loan
};
struct SaveUnit {
  SaveWay way = SaveWay::kNow;
  int64_t first_tile = 0, end_tile = 0;  // of its block; with kUpdate
  bool gathered = false;                 // its weights are, after the last tile's update
};

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
    const ShardedOptimizer* optimizer;  // may be null: weights alone
    StreamView stream;                  // of compute
    StreamView gathers;                 // in which weights are gathered: a group's, or the same
    std::vector<SaveUnit> units;
    int64_t step = 0, updates = 0;  // the step, and updates when all of its are done
  };

  // Reads what must be read now; throws what the sink does.
  StepSave(const StepSaveSetup& setup, State state);
  ~StepSave();  // what has not come by now is given up
  StepSave(const StepSave&) = delete;
  StepSave& operator=(const StepSave&) = delete;

  // TrainStep's: none of them throws for the sink, whose failure ends the save and waits for finish().
  // The tile has just been updated, by the update of that step.
  void updated(int64_t unit, int64_t tile, int64_t step);
  // Its weights are being gathered.
  void gathered(int64_t unit);
  // A loan of the unit is about to end; its weights are still in their slot.
  void returning(int64_t unit, const Loan& loan);
  // The slot that holds the array is about to hold another one: waits until the sink has what was lent from
  // it.
  void take_back(Pool pool, int64_t array);
  // Afterwards all memory may change.
  void wait_beside();
  // Slots are empty and what was deferred is done: what would still have come with a loan is read.
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
  class Busy;
  static constexpr int64_t kThreadStaging = kSaveStaging / 2;  // for what stays and for what is lent
  using Writes = std::vector<StateSink::Write>;
  // Whose slot bytes are lent from, by pool and array; kUntilCheck: memory that changes after the next check.
  using Lender = std::pair<Pool, int64_t>;
  static constexpr Lender kUntilCheck{Pool::kWeights, -1};
  struct Lent {
    Lender lender;
    const StateEntry* entry;
    int64_t offset;
    std::span<const std::byte> bytes;
    std::shared_ptr<Event> made;  // of memory of a GPU: after which it has them
  };
  void take_in();
  bool waits_for(int64_t unit, SaveWay way) const;
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes);
  void read(LiveState& from, Entries entries);
  void lend(const Lent& lent);
  // Of what the stream has been given so far; null on the CPU.
  static std::shared_ptr<Event> made(StreamView stream);
  void lend_tile(int64_t unit, int64_t tile);
  // With them the unit has come. `stream`: that has been given what makes them.
  void lend_weights(int64_t unit, const std::byte* weights, Lender lender, StreamView stream);
  void lend_updated_weights(int64_t unit, StreamView stream);
  void came(int64_t unit);
  void try_on_compute(const std::function<void()>& body);
  void fail();
  // The thread.
  void run();
  void read_beside(Staging& staging);
  void hand_on_lent(Staging& staging, std::unique_lock<std::mutex>& lock);

  const StepSaveSetup setup_;
  State state_;
  std::vector<Entries> weights_, optimizer_;  // of each unit; empty: it has none
  std::vector<int64_t> next_tile_;            // of each unit that comes with its update
  std::vector<char> came_;                    // each unit that comes with the step
  std::vector<Entries> beside_;               // the thread's
  double compute_seconds_ = 0;

  // Beside a GPU's compute the thread has a stream of its own, which begins when the state is there.
  Stream stream_;
  Event begins_, gathered_;
  int gpu_ = 0;  // that it selects

  std::atomic<bool> given_up_{false};  // no byte more
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t expected_ = 0;             // units that still have to come with the step
  std::deque<Lent> lent_;            // not handed on yet
  std::map<Lender, int64_t> owing_;  // how many of those each has, and the one being handed on
  Writes writes_;                    // under way, from memory that is lent until the check
  bool beside_done_ = false, ended_ = false;
  std::exception_ptr failure_;  // the first
  std::thread thread_;
};

}  // namespace lm
