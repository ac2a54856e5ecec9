// The order of an epoch: a permutation of [0, size) that depends only on (seed, epoch, purpose) and is
// computed entry by entry, so that no list is stored and any position is available at once. A plain value;
// any thread.
#pragma once

#include <array>
#include <cstdint>

namespace lm {

enum class ShufflePurpose : uint32_t { kEpoch = 1, kEvalSplit = 2, kWeights = 3 };

class Permutation {
 public:
  Permutation(int64_t size, int64_t seed, int64_t epoch, ShufflePurpose purpose);
  int64_t size() const { return size_; }
  // The image of `index`; a bijection of [0, size).
  int64_t operator()(int64_t index) const;

 private:
  // A Feistel network over 2 * half_bits_ bits is a bijection of a power of four; values beyond `size_` are
  // mapped again until they fall inside (on average less than 4 times), which keeps it a bijection.
  static constexpr int kRounds = 8;
  uint64_t feistel(uint64_t value) const;

  int64_t size_;
  int half_bits_;
  std::array<uint32_t, kRounds> keys_;
};

}  // namespace lm
