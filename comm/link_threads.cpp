#include "comm/link_threads.h"

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace lm {

double LinkThreads::now() const {
  return monotonic_seconds();
}

void LinkThreads::nap(double seconds) const {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

bool LinkThreads::wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                           double seconds, const std::function<bool()>& done) const {
  return changed.wait_for(lock, std::chrono::duration<double>(seconds), done);
}

void LinkThreads::start(std::function<void()> work) const {
  std::thread(std::move(work)).detach();
}

const LinkThreads& machine_threads() {
  static const LinkThreads threads;
  return threads;
}

}  // namespace lm
