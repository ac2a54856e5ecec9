// Assembles the next step's batches on a thread of its own while the step before them computes: one step
// ahead, never more. The position is that of the batches handed out, so that a checkpoint does not count
// what was only prepared. Owned and called by one thread, the compute thread; it borrows the loader, which
// nobody else may call between the first next() and the end of this, except before restore().
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "base/batch.h"
#include "base/clock.h"
#include "data/batch_source.h"

namespace lm {

// A step's batches, and the loader behind them.
struct ReadyStep {
  StepBatches batches;
  LoaderPosition position;    // of the step that follows
  double epoch = 0;           // epochs of data seen with this step, with a fraction
  double waited_seconds = 0;  // of the caller
};

class Prefetch {
 public:
  // `clock`: monotonic seconds.
  explicit Prefetch(BatchSource& loader, std::function<double()> clock = monotonic_seconds);
  ~Prefetch();  // waits for what is being assembled
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  // The batches of the step at position(), which moves behind it. With `more` those of the next step are
  // begun. Throws what the loader throws for this step; the position then stays.
  ReadyStep next(bool more);

  const LoaderPosition& position() const { return position_; }
  // Forgets what is prepared; the loader is idle when this returns, and until the next call of next().
  void restore(const LoaderPosition& position);

 private:
  enum class State : uint8_t { kIdle, kWanted, kReady };

  void start();
  void begin();
  // Waits until nothing is being assembled.
  void settle(std::unique_lock<std::mutex>& lock);
  void run();
  ReadyStep assemble(const LoaderPosition& from);

  BatchSource& loader_;
  const std::function<double()> clock_;
  LoaderPosition position_;

  std::mutex mutex_;
  std::condition_variable changed_;  // the next members, which the mutex guards
  State state_ = State::kIdle;
  bool leaving_ = false;
  LoaderPosition from_;             // of what is wanted
  std::optional<ReadyStep> ready_;  // unset: `failure_`
  std::exception_ptr failure_;

  std::thread thread_;  // from the first next() on
};

}  // namespace lm
