// What every kind of group does, called by each rank of one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "comm/group.h"

namespace lm {

inline std::byte value(int rank, int64_t at) {
  return static_cast<std::byte>((rank * 131 + at * 7 + at / 253) & 0xff);
}

// Runs of random lengths, empty ones among them, in the order of ranks.
inline std::vector<ByteRange> random_shards(std::mt19937& random, int ranks, int64_t longest) {
  std::vector<ByteRange> shards;
  int64_t begin = 0;
  for (int r = 0; r < ranks; ++r) {
    const int64_t bytes = random() % 4 == 0 ? 0 : static_cast<int64_t>(random()) % longest;
    shards.push_back({begin, bytes});
    begin += bytes + static_cast<int64_t>(random() % 3) * 5;
  }
  return shards;
}

inline void all_gather_gives_everyone_every_run(Group& group) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const std::vector<ByteRange> shards =
        random_shards(random, group.ranks(), round % 3 == 0 ? 200000 : 9000);
    std::vector<std::byte> data(static_cast<size_t>(shards.back().begin + shards.back().bytes),
                                std::byte{0xee});
    const ByteRange& mine = shards[static_cast<size_t>(group.rank())];
    for (int64_t i = 0; i < mine.bytes; ++i)
      data[static_cast<size_t>(mine.begin + i)] = value(group.rank(), i + round);
    group.all_gather("share", data.data(), shards);
    std::vector<std::byte> wanted(data.size(), std::byte{0xee});
    for (int r = 0; r < group.ranks(); ++r) {
      for (int64_t i = 0; i < shards[static_cast<size_t>(r)].bytes; ++i)
        wanted[static_cast<size_t>(shards[static_cast<size_t>(r)].begin + i)] = value(r, i + round);
    }
    ASSERT_EQ(data, wanted) << "rank " << group.rank() << " round " << round;
  }
}

inline void reduce_scatter_brings_every_rank_its_run_of_all(Group& group) {
  std::mt19937 random(8);
  for (int round = 0; round < 60; ++round) {
    const std::vector<ByteRange> shards =
        random_shards(random, group.ranks(), round % 3 == 0 ? 300000 : 20000);
    std::vector<std::byte> data(static_cast<size_t>(shards.back().begin + shards.back().bytes));
    for (size_t i = 0; i < data.size(); ++i) data[i] = value(group.rank(), static_cast<int64_t>(i) + round);
    int64_t done = 0;
    const ByteRange& mine = shards[static_cast<size_t>(group.rank())];
    group.reduce_scatter("exchange", data.data(), shards,
                         [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                           ASSERT_EQ(offset, done);
                           ASSERT_EQ(std::ssize(from), group.ranks());
                           ASSERT_TRUE(bytes % kReduceScatterPart == 0 || offset + bytes == mine.bytes);
                           for (int r = 0; r < group.ranks(); ++r) {
                             for (int64_t i = 0; i < bytes; ++i)
                               ASSERT_EQ(from[static_cast<size_t>(r)][i],
                                         value(r, mine.begin + offset + i + round));
                           }
                           done += bytes;
                         });
    ASSERT_EQ(done, mine.bytes);
  }
}

inline void all_to_all_brings_every_rank_what_each_has_for_it(Group& group) {
  std::mt19937 random(10);
  for (int round = 0; round < 60; ++round) {
    const std::vector<ByteRange> shards =
        random_shards(random, group.ranks(), round % 3 == 0 ? 300000 : 20000);
    std::vector<std::byte> data(static_cast<size_t>(shards.back().end()));
    for (size_t i = 0; i < data.size(); ++i) data[i] = value(group.rank(), static_cast<int64_t>(i) + round);
    const ByteRange& mine = shards[static_cast<size_t>(group.rank())];
    std::vector<std::vector<std::byte>> from(static_cast<size_t>(group.ranks()));
    group.all_to_all("rows", data.data(), shards,
                     [&](int rank, int64_t offset, std::span<const std::byte> bytes) {
                       std::vector<std::byte>& of_rank = from.at(static_cast<size_t>(rank));
                       ASSERT_EQ(offset, std::ssize(of_rank));
                       of_rank.insert(of_rank.end(), bytes.begin(), bytes.end());
                     });
    for (int r = 0; r < group.ranks(); ++r) {
      const std::vector<std::byte>& of_rank = from[static_cast<size_t>(r)];
      ASSERT_EQ(std::ssize(of_rank), mine.bytes) << r;
      for (int64_t i = 0; i < mine.bytes; ++i)
        ASSERT_EQ(of_rank[static_cast<size_t>(i)], value(r, mine.begin + i + round)) << r;
    }
  }
}

// Every second rank, and then halves: two sets make the call at once, with shards of other lengths.
inline void a_reduce_scatter_among_some_brings_theirs(Group& group) {
  if (group.ranks() % 2 != 0) return;
  std::mt19937 random(9);
  const int half = group.ranks() / 2, rank = group.rank();
  for (int round = 0; round < 20; ++round) {
    const bool odd = round % 2 == 1;
    Members members{.ranks = {}, .place = odd ? rank / 2 : rank % half};
    for (int i = 0; i < half; ++i) members.ranks.push_back(odd ? rank % 2 + 2 * i : rank / half * half + i);
    const int set = odd ? rank % 2 : rank / half;
    const std::vector<ByteRange> first = random_shards(random, half, 100000),
                                 second = random_shards(random, half, 9000);
    const std::vector<ByteRange>& shards = set == 0 ? first : second;
    std::vector<std::byte> data(static_cast<size_t>(shards.back().begin + shards.back().bytes));
    for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, static_cast<int64_t>(i) + round);
    const ByteRange& mine = shards[static_cast<size_t>(members.place)];
    int64_t done = 0;
    group.reduce_scatter_among(
        members, "exchange among some", data.data(), shards, std::max(longest_of(first), longest_of(second)),
        [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
          ASSERT_EQ(offset, done);
          ASSERT_EQ(std::ssize(from), half);
          for (size_t m = 0; m < from.size(); ++m) {
            for (int64_t i = 0; i < bytes; ++i)
              ASSERT_EQ(from[m][i], value(members.ranks[m], mine.begin + offset + i + round));
          }
          done += bytes;
        });
    ASSERT_EQ(done, mine.bytes);
  }
}

// As gradients do: the sum replaces what was there, in the order of ranks.
inline void a_reduce_scatter_may_add_where_the_array_is(Group& group) {
  constexpr int64_t kEach = 50000;
  std::vector<uint32_t> data(static_cast<size_t>(kEach * group.ranks()));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint32_t>(i * 7 + 1) << group.rank();
  std::vector<ByteRange> shards;
  for (int r = 0; r < group.ranks(); ++r) shards.push_back({r * kEach * 4, kEach * 4});
  uint32_t* const mine = data.data() + group.rank() * kEach;
  group.reduce_scatter("sum", reinterpret_cast<const std::byte*>(data.data()), shards,
                       [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                         uint32_t* const out = mine + offset / 4;
                         for (int r = 0; r < group.ranks(); ++r) {
                           const auto* const part =
                               reinterpret_cast<const uint32_t*>(from[static_cast<size_t>(r)]);
                           for (int64_t i = 0; i < bytes / 4; ++i)
                             out[i] = (r == 0 ? 0 : 3 * out[i]) + part[i];
                         }
                       });
  for (int64_t i = 0; i < kEach; ++i) {
    const auto value = static_cast<uint32_t>((group.rank() * kEach + i) * 7 + 1);
    uint32_t wanted = 0;
    for (int r = 0; r < group.ranks(); ++r) wanted = 3 * wanted + (value << r);
    ASSERT_EQ(mine[i], wanted) << i;
  }
}

// On machines that are imitated, of each number of ranks that divides the group's. `counts`: the group that
// knows what it has sent.
inline void what_is_shared_crosses_once_per_machine(Group& group, Group& counts) {
  for (int each = 1; each <= group.ranks(); ++each) {
    if (group.ranks() % each != 0) continue;
    group.set_machines(each);
    counts.set_machines(each);
    all_gather_gives_everyone_every_run(group);
    std::vector<ByteRange> shards;
    int64_t all = 0;
    for (int r = 0; r < group.ranks(); ++r) {
      shards.push_back({all, 20000 + 1000 * r});
      all += shards.back().bytes;
    }
    std::vector<std::byte> data(static_cast<size_t>(all));
    const int64_t before = counts.sent_bytes(), before_between = counts.sent_between_machines();
    group.all_gather("share", data.data(), shards);
    const int machines = group.ranks() / each;
    int64_t of_place = 0;
    for (int r = group.rank() % each; r < group.ranks(); r += each)
      of_place += shards[static_cast<size_t>(r)].bytes;
    const int64_t between = (machines - 1) * shards[static_cast<size_t>(group.rank())].bytes;
    ASSERT_EQ(counts.sent_between_machines() - before_between, between) << each << " to a machine";
    ASSERT_EQ(counts.sent_bytes() - before, between + (each - 1) * of_place) << each << " to a machine";
    group.barrier("barrier");
  }
}

// Groups of neighbouring ranks, of each number that divides all: each group's ranks share its own array, and
// nothing leaves it; then those with one place share copies, which go to as many other groups.
inline void groups_share_their_own_and_copies(Group& group, Group& counts) {
  std::mt19937 random(10);
  const int ranks = group.ranks(), rank = group.rank();
  for (int each = 1; each <= ranks; ++each) {
    if (ranks % each != 0) continue;
    group.set_machines(each);
    counts.set_machines(each);
    const int place = rank % each, first = rank - place;
    for (int round = 0; round < 6; ++round) {
      const std::vector<ByteRange> shards = random_shards(random, each, round == 0 ? 200000 : 9000),
                                   parts = random_shards(random, ranks, round == 0 ? 200000 : 9000);
      std::vector<std::byte> data(static_cast<size_t>(shards.back().begin + shards.back().bytes));
      std::vector<std::byte> wanted = data;
      const auto fill = [&](std::vector<std::byte>& to, const ByteRange& run, int by) {
        for (int64_t i = 0; i < run.bytes; ++i) to[static_cast<size_t>(run.begin + i)] = value(by, i + round);
      };
      fill(data, shards[static_cast<size_t>(place)], rank);
      for (int p = 0; p < each; ++p) fill(wanted, shards[static_cast<size_t>(p)], first + p);
      const int64_t before = counts.sent_bytes(), between = counts.sent_between_machines();
      if (each < ranks) {
        group.all_gather("shards of a group", data.data(), shards);
        ASSERT_EQ(data, wanted) << "rank " << rank << ", groups of " << each;
        ASSERT_EQ(counts.sent_bytes() - before, (each - 1) * shards[static_cast<size_t>(place)].bytes);
      }
      ASSERT_EQ(counts.sent_between_machines(), between) << "groups of " << each;
      data.assign(static_cast<size_t>(parts.back().begin + parts.back().bytes), std::byte{0});
      wanted = data;
      fill(data, parts[static_cast<size_t>(rank)], rank);
      for (int r = place; r < ranks; r += each) fill(wanted, parts[static_cast<size_t>(r)], r);
      group.share_copies(each, "copies", data.data(), parts);
      ASSERT_EQ(data, wanted) << "rank " << rank << ", groups of " << each;
      ASSERT_EQ(counts.sent_between_machines() - between,
                (ranks / each - 1) * parts[static_cast<size_t>(rank)].bytes);
    }
  }
}

// `sent`: bytes that the group has sent so far.
inline void gather_broadcast_and_count_what_is_sent(Group& group, const std::function<int64_t()>& sent) {
  const int64_t start = sent();
  const std::vector<double> all = group.gather("gather", 0.5 + group.rank());
  for (int r = 0; r < group.ranks(); ++r) ASSERT_EQ(all[static_cast<size_t>(r)], 0.5 + r);
  const int64_t before = sent();
  ASSERT_EQ(before - start, 8 * (group.ranks() - 1));
  std::vector<std::byte> text(1000, group.rank() == 0 ? std::byte{7} : std::byte{0});
  group.broadcast("broadcast", text);
  ASSERT_EQ(text, std::vector<std::byte>(1000, std::byte{7}));
  ASSERT_EQ(sent() - before, group.rank() == 0 ? 1000 * (group.ranks() - 1) : 0);
  for (int i = 0; i < 2000; ++i) group.barrier("barrier");
}

}  // namespace lm
