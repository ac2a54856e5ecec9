#include "offload/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>

#include "support.h"

namespace lm {
namespace {

using namespace offload_tests;

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
  std::vector<std::byte> chunk(kChunk);
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

}  // namespace
}  // namespace lm
