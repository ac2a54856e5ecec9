// How the two threads of a link start, wait and tell the time: the machine's way, or that of a simulation,
// which runs all ranks of a job in one thread, by a clock of its own. For any thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

namespace lm {

class LinkThreads {
 public:
  virtual ~LinkThreads() = default;
  // Seconds of the monotonic clock.
  virtual double now() const;
  virtual void nap(double seconds) const;  // 0: looks again at once
  // As std::condition_variable::wait_for: gives done(), after `seconds` at most.
  virtual bool wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double seconds,
                        const std::function<bool()>& done) const;
  // Begins `work` beside the caller; nobody waits for its end.
  virtual void start(std::function<void()> work) const;
};

const LinkThreads& machine_threads();

}  // namespace lm
