#include "base/bytes.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(Bytes, ReadsUnitsAndRefusesWhatIsNoSize) {
  EXPECT_EQ(parse_bytes("24GiB"), 24 * kGiB);
  EXPECT_EQ(parse_bytes("1.5 MiB"), 3 * kMiB / 2);
  EXPECT_EQ(parse_bytes("10GB"), 10'000'000'000);
  EXPECT_EQ(parse_bytes("4096"), 4096);
  for (const char* bad : {"", "GiB", "-1", "1 parsec", "1e30TiB", "nan", "99999999999999999999"}) {
    EXPECT_EQ(parse_bytes(bad), std::nullopt) << bad;
  }
}

TEST(Bytes, ChecksArithmetic) {
  EXPECT_EQ(checked_multiply(3, 5), 15);
  EXPECT_EQ(checked_multiply(int64_t{1} << 62, 4), std::nullopt);
  EXPECT_EQ(checked_multiply(-1, 4), std::nullopt);
  EXPECT_EQ(checked_add(INT64_MAX, 1), std::nullopt);
}

TEST(Bytes, PrintsForPeople) {
  EXPECT_EQ(format_bytes(17), "17 B");
  EXPECT_EQ(format_bytes(3 * kGiB / 2), "1.50 GiB");
}

}  // namespace
}  // namespace lm
