// How fast this processor is right now, for tests of processor time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <map>
#include <vector>

namespace lm::test {

// Processor time that body() takes.
template <class Body>
double processor_seconds(const Body& body) {
  const std::clock_t start = std::clock();
  body();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// What a core of a server takes for a pace, without neighbours.
constexpr double kUsualPace = 4e-3;

// Seconds of a fixed piece of work with the habits of a planner: small allocations, pointers, branches.
inline double pace_seconds() {
  constexpr uint32_t kKeys = 20000;
  uint64_t sum = 0;
  const double seconds = processor_seconds([&] {
    std::map<uint32_t, uint32_t> map;
    for (uint32_t i = 0, x = 1; i < kKeys; ++i) {
      x = x * 1664525u + 1013904223u;
      map[x >> 12] += i;
    }
    for (const auto& [key, value] : map) sum += value;
  });
  return sum > 0 ? seconds : 0;
}

// Processor time of body(): the least of some tries, or what it would be at the usual pace if that is less. A
// neighbour on the same core, of this machine or of another virtual one, makes all code slower for minutes,
// which no number of tries outlasts; it takes the same part of the pace beside it. Tries again, `most` times
// in all, until the result is below `limit`.
template <class Body>
double usual_seconds(double limit, size_t most, const Body& body) {
  constexpr size_t kFew = 20;
  const auto median = [](std::vector<double> of) {
    std::nth_element(of.begin(), of.begin() + std::ssize(of) / 2, of.end());
    return of[of.size() / 2];
  };
  std::vector<double> seconds, pace;
  double out = limit;
  while (seconds.size() < most && (seconds.size() < kFew || out >= limit)) {
    pace.push_back(pace_seconds());
    seconds.push_back(processor_seconds(body));
    const double slowness = std::max(1.0, median(pace) / kUsualPace);
    out = std::min(*std::min_element(seconds.begin(), seconds.end()), median(seconds) / slowness);
  }
  return out;
}

}  // namespace lm::test
