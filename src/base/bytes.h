// Sizes in bytes: overflow-checked arithmetic, rounding, and the spelling "24GiB".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lm {

inline constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
constexpr int64_t ceil_div(int64_t n, int64_t d) {
  return (n + d - 1) / d;
}

// nullopt if the exact result does not fit (or an operand is negative): sizes from files are never trusted.
constexpr std::optional<int64_t> checked_multiply(int64_t a, int64_t b) {
  int64_t r = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &r)) return std::nullopt;
  return r;
}
constexpr std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t r = 0;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &r)) return std::nullopt;
  return r;
}

// "24GiB", "1.5 GB", "512MiB", "4096B". Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones
// (KB, MB, GB, TB) of 1000. nullopt if it is not a size, is negative or does not fit, or has no unit: 24 for
// a GPU's memory does not mean 24 bytes.
std::optional<int64_t> parse_bytes(std::string_view text);

// The likely meaning of a number without a unit: "24" -> "24GiB" with `unit` "GiB", and from 1 MiB on bytes,
// "17179869184" -> "16GiB". "" if it is not a positive number.
std::string with_unit(std::string_view text, std::string_view unit);

// In the largest binary unit that divides it, "1536MiB"; parse_bytes reads it back exactly.
std::string exact_bytes(int64_t bytes);

// "1.50 GiB", "612 KiB", "17 B".
std::string format_bytes(int64_t bytes);

}  // namespace lm
