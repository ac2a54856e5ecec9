#include "base/arena.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lm {
namespace {

TEST(Arena, GivesTheSameAddressesAgainAfterAFrame) {
  Arena arena(DeviceType::kCpu, 4096);
  std::byte* first = nullptr;
  {
    const ArenaFrame frame(arena);
    first = arena.allocate(300);
    EXPECT_EQ(arena.allocate(1), first + 512);
  }
  EXPECT_EQ(arena.mark(), 0);
  EXPECT_EQ(arena.allocate(10), first);
  EXPECT_EQ(arena.high_water(), 768);
}

TEST(Arena, RefusesMoreThanWasPlanned) {
  Arena arena(DeviceType::kCpu, 1024);
  arena.allocate(512);
  EXPECT_THROW(arena.allocate(513), Error);
  EXPECT_NO_THROW(arena.allocate(512));
}

TEST(Memory, IsZeroedAndMovable) {
  Memory a(DeviceType::kCpu, 1000);
  for (int64_t i = 0; i < a.size(); ++i) ASSERT_EQ(a.data()[i], std::byte{0});
  std::byte* const data = a.data();
  const Memory b = std::move(a);
  EXPECT_EQ(b.data(), data);
}

}  // namespace
}  // namespace lm
