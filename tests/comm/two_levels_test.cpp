// Sums and gathers in two levels, of machines that are imitated: ranks are threads of one group.
#include "comm/two_levels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "comm/shared_group.h"

namespace lm {
namespace {

struct Grouping {
  int machines, each;
};

float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Of magnitudes so different that each order of additions gives other bits.
std::vector<float> values(int rank, int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank) + 1);
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i)
    out.push_back(
        std::ldexp(static_cast<float>(random() % 20001) - 10000.0F, static_cast<int>(random() % 24) - 12));
  return out;
}

// A rank's array as it is sent.
std::vector<std::byte> bytes_of(const std::vector<float>& values, int64_t element_bytes) {
  std::vector<std::byte> out(values.size() * static_cast<size_t>(element_bytes));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const uint16_t high = static_cast<uint16_t>(bits >> 16);
    if (element_bytes == 4) std::memcpy(out.data() + i * 4, &bits, 4);
    if (element_bytes == 2) std::memcpy(out.data() + i * 2, &high, 2);
  }
  return out;
}

float element(const std::byte* array, int64_t i, int64_t element_bytes) {
  if (element_bytes == 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, array + i * 2, 2);
    return from_bf16(bits);
  }
  float value = 0;
  std::memcpy(&value, array + i * 4, 4);
  return value;
}

// What the order of additions is defined to be, one element at a time.
float wanted(const std::vector<std::vector<std::byte>>& arrays, const Grouping& grouping, int64_t i,
             int64_t element_bytes) {
  float total = 0;
  for (int m = 0; m < grouping.machines; ++m) {
    float sum = 0;
    for (int l = 0; l < grouping.each; ++l) {
      const float one = element(arrays[static_cast<size_t>(m * grouping.each + l)].data(), i, element_bytes);
      sum = l == 0 ? one : sum + one;
    }
    total = m == 0 ? sum : total + sum;
  }
  return total;
}

struct Summed {
  std::vector<float> shard;
  int64_t sent = 0;
};

TwoLevelAdd adding_into(std::vector<float>& out, int64_t element_bytes) {
  return {.element_bytes = element_bytes,
          .inside =
              [element_bytes](float* to, int64_t elements, std::span<const std::byte* const> from) {
                for (int64_t i = 0; i < elements; ++i) {
                  to[i] = element(from[0], i, element_bytes);
                  for (const std::byte* const rank : from.subspan(1))
                    to[i] += element(rank, i, element_bytes);
                }
              },
          .across =
              [&out](int64_t first, int64_t elements, std::span<const std::byte* const> from) {
                ASSERT_EQ(first, std::ssize(out));
                for (int64_t i = 0; i < elements; ++i) {
                  float sum = element(from[0], i, 4);
                  for (const std::byte* const machine : from.subspan(1)) sum += element(machine, i, 4);
                  out.push_back(sum);
                }
              }};
}

// All ranks at once; `shards` in elements.
std::vector<Summed> sum(const Grouping& grouping, const std::vector<std::vector<std::byte>>& arrays,
                        const std::vector<ByteRange>& shards, int64_t element_bytes, int64_t partial) {
  SharedRegion region = SharedRegion::create(static_cast<int>(std::ssize(arrays)), int64_t{1} << 17);
  std::vector<ByteRange> ranges;
  for (const ByteRange& shard : shards)
    ranges.push_back({shard.begin * element_bytes, shard.bytes * element_bytes});
  std::vector<Summed> out(arrays.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < std::ssize(arrays); ++r) {
    threads.emplace_back([&, r] {
      SharedGroup group(region, r);
      TwoLevels levels(group, grouping.each, DeviceType::kCpu, partial);
      Summed& mine = out[static_cast<size_t>(r)];
      levels.reduce_scatter("sum", arrays[static_cast<size_t>(r)].data(), ranges,
                            adding_into(mine.shard, element_bytes));
      mine.sent = group.sent_bytes();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

class TwoLevelSums : public ::testing::TestWithParam<Grouping> {};

TEST_P(TwoLevelSums, AreAddedByRankThenByMachine) {
  const Grouping grouping = GetParam();
  const int ranks = grouping.machines * grouping.each;
  for (const int64_t element_bytes : {4, 2}) {
    // Shards of one length but the last, which is short; then one that is empty, and several rounds.
    for (const int64_t length : {int64_t{3000}, int64_t{50000}}) {
      std::vector<ByteRange> shards;
      for (int r = 0; r < ranks; ++r) shards.push_back({r * length, r + 1 < ranks ? length : length / 3});
      if (ranks > 2) shards[1].bytes = 0;
      std::vector<std::vector<std::byte>> arrays;
      for (int r = 0; r < ranks; ++r) arrays.push_back(bytes_of(values(r, ranks * length), element_bytes));
      const int64_t partial = grouping.machines * kReduceScatterPart * 4 * 3;
      const std::vector<Summed> got = sum(grouping, arrays, shards, element_bytes, partial);
      for (int r = 0; r < ranks; ++r) {
        const ByteRange& shard = shards[static_cast<size_t>(r)];
        const std::vector<float>& mine = got[static_cast<size_t>(r)].shard;
        ASSERT_EQ(std::ssize(mine), shard.bytes);
        for (int64_t i = 0; i < shard.bytes; ++i) {
          ASSERT_EQ(std::bit_cast<uint32_t>(mine[static_cast<size_t>(i)]),
                    std::bit_cast<uint32_t>(wanted(arrays, grouping, shard.begin + i, element_bytes)))
              << "rank " << r << " element " << i;
        }
      }
    }
  }
}

// A rank sends what others of its machine add up; and, of each other machine, one sum to one rank.
TEST_P(TwoLevelSums, CrossBetweenMachinesOncePerMachine) {
  const Grouping grouping = GetParam();
  const int ranks = grouping.machines * grouping.each;
  constexpr int64_t kLength = 20000;
  std::vector<ByteRange> shards;
  for (int r = 0; r < ranks; ++r) shards.push_back({r * kLength, kLength});
  for (const int64_t element_bytes : {4, 2}) {
    std::vector<std::vector<std::byte>> arrays;
    for (int r = 0; r < ranks; ++r) arrays.push_back(bytes_of(values(r, ranks * kLength), element_bytes));
    const int64_t inside = (grouping.each - 1) * grouping.machines * kLength * element_bytes,
                  between = (grouping.machines - 1) * kLength * 4;
    for (const Summed& rank : sum(grouping, arrays, shards, element_bytes, int64_t{4} << 20))
      EXPECT_EQ(rank.sent, inside + between);
  }
}

INSTANTIATE_TEST_SUITE_P(Groupings, TwoLevelSums,
                         ::testing::Values(Grouping{1, 1}, Grouping{1, 4}, Grouping{2, 2}, Grouping{2, 3},
                                           Grouping{3, 2}, Grouping{4, 1}),
                         [](const auto& info) {
                           return std::to_string(info.param.machines) + "x" + std::to_string(info.param.each);
                         });

// One to four machines of one to four ranks: the bytes of a gather in one level, and each machine gets each
// byte of another's once.
TEST(TwoLevelGathers, HaveTheBytesOfOneAndCrossOncePerMachine) {
  for (int machines = 1; machines <= 4; ++machines) {
    for (int each = 1; each <= 4; ++each) {
      const int ranks = machines * each;
      std::vector<ByteRange> shards;
      int64_t all = 0;
      for (int r = 0; r < ranks; ++r) {
        shards.push_back({all, r % 3 == 2 ? 0 : 40000 + 77 * r});  // in several rounds, some of nothing
        all += shards.back().bytes;
      }
      std::vector<std::vector<std::byte>> got[2];
      std::vector<int64_t> between(static_cast<size_t>(ranks));
      for (const bool levels : {false, true}) {
        SharedRegion region = SharedRegion::create(ranks, int64_t{1} << 17);
        got[levels ? 1 : 0].resize(static_cast<size_t>(ranks));
        std::vector<std::thread> threads;
        for (int r = 0; r < ranks; ++r) {
          threads.emplace_back([&, r] {
            SharedGroup group(region, r);
            if (levels) group.set_machines(each);
            std::vector<std::byte>& data = got[levels ? 1 : 0][static_cast<size_t>(r)];
            data.resize(static_cast<size_t>(all));
            const ByteRange mine = shards[static_cast<size_t>(r)];
            for (int64_t i = 0; i < mine.bytes; ++i)
              data[static_cast<size_t>(mine.begin + i)] = static_cast<std::byte>(i * 7 + r);
            group.all_gather("gather", data.data(), shards);
            between[static_cast<size_t>(r)] = group.sent_between_machines();
          });
        }
        for (std::thread& thread : threads) thread.join();
      }
      EXPECT_EQ(got[1], got[0]) << machines << " machines of " << each;
      EXPECT_EQ(got[1].front(), got[1].back());
      EXPECT_EQ(std::accumulate(between.begin(), between.end(), int64_t{0}), (machines - 1) * all)
          << machines << " machines of " << each;
    }
  }
}

// So a run has to keep its grouping.
TEST(TwoLevelGroupings, HaveOtherBitsInAnotherGrouping) {
  constexpr int64_t kLength = 3000;
  std::vector<ByteRange> shards;
  std::vector<std::vector<std::byte>> arrays;
  for (int r = 0; r < 6; ++r) shards.push_back({r * kLength, kLength});
  for (int r = 0; r < 6; ++r) arrays.push_back(bytes_of(values(r, 6 * kLength), 4));
  const auto first = [&](const Grouping& grouping) {
    return sum(grouping, arrays, shards, 4, int64_t{4} << 20)[0].shard;
  };
  const std::vector<float> one = first({1, 6});
  EXPECT_NE(first({2, 3}), one);
  EXPECT_NE(first({3, 2}), first({2, 3}));
  EXPECT_EQ(first({6, 1}), one);
}

}  // namespace
}  // namespace lm
