// Ranks of one job are of one version.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/shared_group.h"

namespace lm {
namespace {

// What each rank throws; "" nothing.
std::vector<std::string> errors_of(const std::vector<std::string>& versions) {
  SharedRegion region = SharedRegion::create(static_cast<int>(versions.size()));
  std::vector<std::string> out(versions.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < versions.size(); ++r) {
    threads.emplace_back([&, r] {
      SharedGroup group(region, static_cast<int>(r));
      try {
        agree_on_version(group, versions[r]);
      } catch (const Error& error) {
        out[r] = std::to_string(static_cast<int>(error.code())) + " " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

TEST(VersionAgreement, RanksOfOneVersionGoOn) {
  EXPECT_EQ(errors_of({"1.2.0", "1.2.0", "1.2.0"}), std::vector<std::string>(3));
}

TEST(VersionAgreement, AnotherVersionIsNamedOnAllRanks) {
  for (const std::string& error : errors_of({"1.2.0", "1.2.0", "1.1.9"}))
    EXPECT_EQ(error, "10 rank 2 is lmlaunch 1.1.9, and rank 0 is lmlaunch 1.2.0");
}

}  // namespace
}  // namespace lm
