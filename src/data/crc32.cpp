#include "data/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace lm {
namespace {

// table[k][b]: what byte b does to the remainder when k more bytes follow it, so that sixteen bytes are one
// step of independent look-ups instead of sixteen dependent ones.
constexpr size_t kStep = 16;
using Tables = std::array<std::array<uint32_t, 256>, kStep>;

constexpr Tables make_tables() {
  Tables table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320U & (0U - (crc & 1U)));
    table[0][byte] = crc;
  }
  for (size_t k = 1; k < kStep; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table[k - 1][byte];
      table[k][byte] = (before >> 8) ^ table[0][before & 0xff];
    }
  }
  return table;
}
constexpr Tables kTable = make_tables();
static_assert(std::endian::native == std::endian::little, "the first four bytes are joined as a number");

}  // namespace

uint32_t crc32(std::span<const unsigned char> data) {
  uint32_t crc = ~0U;
  for (; data.size() >= kStep; data = data.subspan(kStep)) {
    uint32_t word[4];
    std::memcpy(word, data.data(), sizeof word);
    word[0] ^= crc;
    crc = 0;
    for (size_t w = 0; w < 4; ++w) {
      for (size_t b = 0; b < 4; ++b) crc ^= kTable[kStep - 1 - 4 * w - b][word[w] >> 8 * b & 0xff];
    }
  }
  for (const unsigned char byte : data) crc = (crc >> 8) ^ kTable[0][(crc ^ byte) & 0xff];
  return ~crc;
}

}  // namespace lm
