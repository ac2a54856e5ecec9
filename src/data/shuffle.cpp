#include "data/shuffle.h"

#include <algorithm>

#include "base/error.h"
#include "base/philox.h"

namespace lm {
namespace {

// Scatters 32 bits (a finaliser whose every input bit moves half of the output bits).
uint32_t scatter(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

}  // namespace

Permutation::Permutation(int64_t size, int64_t seed, int64_t epoch, ShufflePurpose purpose) : size_(size) {
  LM_CHECK(size >= 0 && size < (int64_t{1} << 60), "size of a permutation");
  // At least 256 values: on narrower halves eight rounds do not mix well.
  half_bits_ = 4;
  while ((int64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
  const auto e = static_cast<uint64_t>(epoch);
  for (uint32_t i = 0; i < kRounds; i += 4) {
    const auto words = philox<uint32_t>(static_cast<uint64_t>(seed), static_cast<uint32_t>(e),
                                        static_cast<uint32_t>(e >> 32), static_cast<uint32_t>(purpose), i);
    std::copy_n(words.word, 4, keys_.begin() + i);
  }
}

uint64_t Permutation::feistel(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (const uint32_t key : keys_) {
    const uint64_t next = left ^ (scatter(static_cast<uint32_t>(right) ^ key) & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

int64_t Permutation::operator()(int64_t index) const {
  LM_CHECK(index >= 0 && index < size_, "index of a permutation");
  auto value = static_cast<uint64_t>(index);
  do {
    value = feistel(value);
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

}  // namespace lm
