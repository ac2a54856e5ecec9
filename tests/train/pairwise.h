// Covering arrays for the tests that go through settings of a run: few rows in which every pair of two
// factors' levels stands together. Drawn with a seed, so the same everywhere.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "offloaded_run.h"

namespace lm::offloaded_run {

// `levels[f]` of factor f; each row has one level of each. A row is the best of 200 draws that hold a missing
// pair, drawn as well, so early rows cover the most.
template <size_t n>
std::vector<std::array<size_t, n>> pairwise(const std::array<size_t, n>& levels, uint32_t seed) {
  using Row = std::array<size_t, n>;
  constexpr int kTries = 200;
  std::mt19937 random(seed);
  // Of factors a < b, whether levels i and j have not stood together.
  std::vector<std::vector<char>> missing(n * n);
  size_t left = 0;
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = a + 1; b < n; ++b)
      missing[a * n + b].assign(levels[a] * levels[b], 1), left += levels[a] * levels[b];
  }
  const auto each_pair = [&](const Row& row, const auto& body) {
    for (size_t a = 0; a < n; ++a) {
      for (size_t b = a + 1; b < n; ++b) body(missing[a * n + b][row[a] * levels[b] + row[b]]);
    }
  };
  const auto with_a_missing_pair = [&](Row row) {
    size_t skip = random() % left;
    for (size_t a = 0; a < n; ++a) {
      for (size_t b = a + 1; b < n; ++b) {
        const std::vector<char>& pairs = missing[a * n + b];
        for (size_t p = 0; p < pairs.size(); ++p) {
          if (pairs[p] == 0 || skip-- > 0) continue;
          row[a] = p / levels[b], row[b] = p % levels[b];
          return row;
        }
      }
    }
    return row;
  };
  std::vector<Row> out;
  while (left > 0) {
    Row best = {};
    int most = -1;
    for (int i = 0; i < kTries; ++i) {
      Row row;
      for (size_t f = 0; f < n; ++f) row[f] = random() % levels[f];
      row = with_a_missing_pair(row);
      int gain = 0;
      each_pair(row, [&](char is_missing) { gain += is_missing; });
      if (gain > most) most = gain, best = row;
    }
    each_pair(best, [&](char& is_missing) { left -= static_cast<size_t>(is_missing), is_missing = 0; });
    out.push_back(best);
  }
  return out;
}

// 0: on the device; 1, 2, 3: off it in host memory, on disk, half and half; 4: in host memory, updated there.
inline constexpr size_t kOffloadTiers = 5;
inline void set_tier(size_t tier_id, Variant& run) {
  run.optimizer = run.weights = tier_id > 0;
  run.slots_on_device = tier_id == 1 || tier_id >= 3;
  run.host = tier_id == 1 || tier_id == 4 ? 1 : tier_id == 3 ? 2 : 0;
  run.mixed = tier_id == 3;
  run.on_host = tier_id == 4;
}

}  // namespace lm::offloaded_run
