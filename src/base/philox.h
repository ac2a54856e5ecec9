// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): the one source of randomness.
// A number is a pure function of a 64-bit key and a 128-bit counter, so it does not depend on threads,
// devices or earlier draws. Host and device, any thread.
//
// Number `index` of a key is word (index / 16) % 4 of call (index / 64) * 16 + index % 16: sixteen neighbours
// are one word of sixteen calls, which suits vector code.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace lm {

// U is uint32_t, or a type of many lanes with the same operators and `mul_high`.
template <class U>
struct PhiloxWords {
  U word[4];
};

template <class U>
LM_HOST_DEVICE PhiloxWords<U> philox(uint64_t key, U c0, U c1, U c2, U c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  const U m0(0xD2511F53u), m1(0xCD9E8D57u);
  LM_UNROLL
  for (int round = 0; round < 10; ++round) {
    const U high0 = mul_high(c0, m0), low0 = c0 * m0;
    const U high1 = mul_high(c2, m1), low1 = c2 * m1;
    c0 = high1 ^ c1 ^ U(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ U(k1);
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

enum class Purpose : uint32_t {
  kRounding = 1,
  kDropout = 2,  // of adapters
  kInit = 3,
  kShuffle = 4,
  kSampling = 5,
  kModelDropout = 6,  // of the embedding and of sublayers
};

// The key of one stream of numbers.
LM_HOST_DEVICE uint64_t philox_key(uint64_t seed, Purpose purpose, uint64_t step, uint32_t tensor) {
  const PhiloxWords<uint32_t> words =
      philox<uint32_t>(seed, static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), tensor,
                       static_cast<uint32_t>(purpose));
  return words.word[0] | static_cast<uint64_t>(words.word[1]) << 32;
}

// Number `index` (see above) of a key, with two more counter words.
LM_HOST_DEVICE uint32_t philox_at(uint64_t key, uint64_t index, uint32_t a, uint32_t b) {
  const uint64_t call = (index >> 6) * 16 + (index & 15);
  return philox<uint32_t>(key, static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32), a, b)
      .word[(index >> 4) & 3];
}

}  // namespace lm
