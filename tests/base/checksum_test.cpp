#include "base/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <random>
#include <vector>

namespace lm {
namespace {

void fill(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
}

TEST(Checksum, IsXxh3) {
  EXPECT_EQ(chunk_checksum({}), 0x2D06800538D394C2u);  // the published value of the empty input
}

TEST(Checksum, IsTheSameWithEveryInstructionSet) {
  std::vector<std::byte> bytes(70000);
  fill(bytes, 1);
  for (size_t size : {0, 1, 3, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4095, 8192, 65536, 69999})
    EXPECT_EQ(chunk_checksum(std::span(bytes).first(size)), XXH3_64bits(bytes.data(), size)) << size;
}

TEST(Checksum, SeesEachOfAThousandFlippedBits) {
  std::vector<std::byte> chunk(kChecksumChunk);
  fill(chunk, 2);
  const uint64_t expected = chunk_checksum(chunk);
  std::mt19937_64 random(3);
  int seen = 0;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t bit = random() % (chunk.size() * 8);
    chunk[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    seen += chunk_checksum(chunk) != expected;
    chunk[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
  EXPECT_EQ(seen, 1000);
  EXPECT_EQ(chunk_checksum(chunk), expected);
}

// An array's last chunk is as if zeros filled it up, whatever lies behind it.
TEST(Checksum, OfAnArrayIsThatOfEachChunkWithZerosBehindTheLast) {
  for (const int64_t size :
       {int64_t{1}, kChecksumChunk - 1, kChecksumChunk, kChecksumChunk + 1, 40 * kChecksumChunk + 7}) {
    const int64_t chunks = (size + kChecksumChunk - 1) / kChecksumChunk;
    std::vector<std::byte> bytes(static_cast<size_t>(chunks * kChecksumChunk));
    fill(bytes, 4);
    std::vector<std::byte> padded = bytes;
    std::fill(padded.begin() + size, padded.end(), std::byte{0});
    std::vector<uint64_t> sums(static_cast<size_t>(chunks));
    chunk_sums_cpu({bytes.data(), size, sums.data()}, {.threads = 3});
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      EXPECT_EQ(sums[static_cast<size_t>(chunk)],
                chunk_checksum(
                    std::span(padded).subspan(static_cast<size_t>(chunk * kChecksumChunk), kChecksumChunk)))
          << size << " " << chunk;
    }
  }
}

}  // namespace
}  // namespace lm
