// Numbers that look random and repeat: of simulated jobs, and of what they compute.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace lm::test {

// SplitMix64: a number of its own for each combination.
inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// Of every bit; never 0.
template <class Number>
uint64_t bits_of(std::span<const Number> numbers) {
  uint64_t hash = 14695981039346656037U;
  for (const Number number : numbers) {
    uint64_t word = 0;
    std::memcpy(&word, &number, sizeof number);
    hash = (hash ^ word) * 1099511628211U;
    hash ^= hash >> 29;
  }
  return hash | 1;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mixed(seed)) {}
  int64_t below(int64_t end) { return static_cast<int64_t>(next() % static_cast<uint64_t>(end)); }
  double between(double low, double high) {
    return low + (high - low) * static_cast<double>(next() >> 11) * 0x1p-53;
  }

 private:
  uint64_t next() { return mixed(state_++); }
  uint64_t state_;
};

}  // namespace lm::test
