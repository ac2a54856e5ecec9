// A wait that reads no clock: on a machine that is busy or stands still it takes longer, and a test that
// waits so fails for nothing else than what never comes.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace lm::test {

// Looks until `done`, for a minute at least; whether it was.
inline bool until(const std::function<bool()>& done) {
  for (int looks = 0; looks < 60'000; ++looks) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return done();
}

}  // namespace lm::test
