// NCCL itself, as far as a machine without a GPU goes: the library that came with LibTorch makes an id and
// refuses the ranks, and our group says so in its words. Where there is a GPU, nccl_group_test goes all the
// way.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/nccl_group.h"
#include "comm/shared_group.h"

namespace lm {
namespace {

class RealNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    if (dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) GTEST_SKIP() << "there is a GPU's driver here";
    try {
      load_nccl();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

TEST_F(RealNccl, MakesAnIdThatIsAnotherEachTime) {
  std::array<NcclId, 2> ids{};
  for (NcclId& id : ids) ASSERT_EQ(load_nccl().unique_id(&id), kNcclSuccess);
  const auto bytes = [](const NcclId& id) { return std::string(id.bytes, sizeof id.bytes); };
  EXPECT_TRUE(std::ranges::any_of(ids[0].bytes, [](char c) { return c != 0; }));
  EXPECT_NE(bytes(ids[0]), bytes(ids[1]));
}

TEST_F(RealNccl, RefusesRanksWithoutADriverInItsOwnWords) {
  constexpr int kRanks = 2;
  SharedRegion region = SharedRegion::create(kRanks);
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup peers(region, r, 20);
        NcclGroup group({.api = load_nccl(), .peers = peers, .lost = peers.watch(), .host = "here"});
      } catch (const Error& error) {
        errors[static_cast<size_t>(r)] = std::to_string(static_cast<int>(error.code())) + " " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < kRanks; ++r) {
    const std::string& error = errors[static_cast<size_t>(r)];
    EXPECT_EQ(error.find("12 NCCL has failed in \"start\": unhandled cuda error"), 0U) << error;
    EXPECT_NE(error.find("CUDA driver version is insufficient"), std::string::npos) << error;
    EXPECT_NE(error.find("at rank " + std::to_string(r) + " on here"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace lm
