// Bytes that tests write somewhere and read back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace lm {

inline std::vector<std::byte> pattern(int64_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

inline bool holds(const std::byte* memory, const std::vector<std::byte>& want) {
  return std::memcmp(memory, want.data(), want.size()) == 0;
}

}  // namespace lm
