#include "base/bytes.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(Bytes, ReadsUnitsAndRefusesWhatIsNoSize) {
  EXPECT_EQ(parse_bytes("24GiB"), 24 * kGiB);
  EXPECT_EQ(parse_bytes("1.5 MiB"), 3 * kMiB / 2);
  EXPECT_EQ(parse_bytes("10GB"), 10'000'000'000);
  EXPECT_EQ(parse_bytes("4096B"), 4096);
  for (const char* bad :
       {"", "4096", "24", "GiB", "-1", "1 parsec", "1e30TiB", "nan", "99999999999999999999"}) {
    EXPECT_EQ(parse_bytes(bad), std::nullopt) << bad;
  }
}

TEST(Bytes, GuessesTheUnitThatWasLeftOut) {
  EXPECT_EQ(with_unit("24", "GiB"), "24GiB");
  EXPECT_EQ(with_unit("1.5", "GiB"), "1.5GiB");
  EXPECT_EQ(with_unit("17179869184", "GiB"), "16GiB");
  EXPECT_EQ(with_unit("17179869185", "GiB"), "17179869185B");
  for (const char* none : {"", "lots", "24GiB", "0", "-3", "1e400"}) EXPECT_EQ(with_unit(none, "GiB"), "");
}

TEST(Bytes, ExactSizesReadBack) {
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, 3 * kMiB, 24 * kGiB, int64_t{1} << 50}) {
    EXPECT_EQ(parse_bytes(exact_bytes(bytes)), bytes) << exact_bytes(bytes);
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
