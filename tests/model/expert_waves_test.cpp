// Who works on which rows where each rank keeps some experts.
#include "model/mixers/expert_waves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace lm {
namespace {

using Counts = std::vector<int32_t>;

// What all ranks know of all waves, each from the same counts.
std::vector<ExpertWaves> of_all_ranks(const Counts& counts, int ranks) {
  std::vector<ExpertWaves> out;
  for (int rank = 0; rank < ranks; ++rank) out.emplace_back(counts, ExpertShare{ranks, rank});
  return out;
}

int64_t rows_of(const Counts& counts, int64_t experts, int rank) {
  const auto begin = counts.begin() + rank * experts;
  return std::accumulate(begin, begin + experts, int64_t{0});
}

// Each row of each rank is in one job of the rank that keeps its expert, waves in the order of experts and
// then of ranks, and each by rank; and the ranges that move are those rows.
void expect_every_row_once(const Counts& counts, int ranks) {
  const int64_t experts = std::ssize(counts) / ranks, each = experts / ranks;
  const std::vector<ExpertWaves> all = of_all_ranks(counts, ranks);
  int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) most = std::max(most, rows_of(counts, experts, rank));
  for (int owner = 0; owner < ranks; ++owner) {
    const ExpertWaves& waves = all[static_cast<size_t>(owner)];
    EXPECT_EQ(waves.count(), all.front().count());
    EXPECT_EQ(waves.capacity(), most);
    std::vector<int64_t> found(counts.size(), 0);
    std::pair<int64_t, int> last{-1, -1};  // of the waves before
    for (int64_t wave = 0; wave < waves.count(); ++wave) {
      int64_t at = 0;
      std::pair<int, int64_t> before{-1, -1};
      std::pair<int64_t, int> latest = last;
      for (const ExpertJob& job : waves.jobs(wave)) {
        EXPECT_EQ(job.expert / each, owner);
        EXPECT_EQ(job.at, at);
        EXPECT_LT(before, std::pair(job.rank, job.expert));
        before = {job.rank, job.expert};
        EXPECT_LT(last, std::pair(job.expert, job.rank));
        latest = std::max(latest, std::pair(job.expert, job.rank));
        found[static_cast<size_t>(job.rank * experts + job.expert)] += job.rows;
        at += job.rows;
      }
      last = latest;
      EXPECT_EQ(waves.rows(wave), at);
      EXPECT_LE(at, waves.capacity());
    }
    for (int rank = 0; rank < ranks; ++rank) {
      for (int64_t expert = 0; expert < experts; ++expert) {
        const auto i = static_cast<size_t>(rank * experts + expert);
        EXPECT_EQ(found[i], expert / each == owner ? counts[i] : 0);
      }
    }
  }
}

// Carries numbered rows there and back, as the groups do: what one says that it sends is what the other says
// that it gets.
void expect_ranges_meet(const Counts& counts, int ranks) {
  const int64_t experts = std::ssize(counts) / ranks;
  const std::vector<ExpertWaves> all = of_all_ranks(counts, ranks);
  std::vector<int64_t> moved(static_cast<size_t>(ranks), 0);
  for (int64_t wave = 0; wave < all.front().count(); ++wave) {
    for (const bool back : {false, true}) {
      std::vector<RowsOnTheWay> ways;
      for (const ExpertWaves& waves : all) ways.push_back(waves.on_the_way(wave, back));
      for (size_t from = 0; from < ways.size(); ++from) {
        for (size_t to = 0; to < ways.size(); ++to) {
          EXPECT_EQ(ways[from].out[to].rows, ways[to].in[from].rows);
          EXPECT_LE(ways[from].out[to].rows, ways[from].most[to]);
          EXPECT_EQ(ways[from].most, ways.front().most);
          // The same rows come back to where they were.
          const RowsOnTheWay there = all[from].on_the_way(wave, false);
          if (back) {
            EXPECT_EQ(ways[from].in[to], there.out[to]);
          }
          if (!back) moved[from] += ways[from].out[to].rows;
        }
        const auto& most = ways.front().most;
        int64_t longest = 0;
        for (const RowsOnTheWay& way : ways) longest = std::max(longest, way.out[from].rows);
        EXPECT_EQ(most[from], longest);
      }
    }
  }
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_EQ(moved[static_cast<size_t>(rank)], rows_of(counts, experts, rank));
}

TEST(ExpertWaves, HaveEveryRowOnceWhateverRoutersSay) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    const int ranks = 1 << random() % 3;
    Counts counts(static_cast<size_t>(ranks * ranks * static_cast<int>(1 + random() % 3)));
    for (int32_t& count : counts) count = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 20);
    expect_every_row_once(counts, ranks);
    expect_ranges_meet(counts, ranks);
  }
}

TEST(ExpertWaves, EvenRoutersNeedOne) {
  EXPECT_EQ(ExpertWaves(Counts{3, 3, 3, 3, 3, 3, 3, 3}, {2, 0}).count(), 1);
  // Both ranks' rows go to the second one, which takes no more at once than a rank has.
  const ExpertWaves one_sided(Counts{0, 0, 6, 6, 0, 0, 6, 6}, {2, 1});
  ASSERT_EQ(one_sided.count(), 2);
  EXPECT_EQ(one_sided.rows(0), 12);
  EXPECT_EQ(one_sided.rows(1), 12);
  EXPECT_EQ(one_sided.jobs(1).front().expert, 3) << "an expert's jobs of both ranks are in one";
  EXPECT_EQ(one_sided.jobs(1).back().expert, 3);
}

TEST(ExpertWaves, WithoutTokensNothingMoves) {
  const ExpertWaves none(Counts(8, 0), {2, 1});
  EXPECT_EQ(none.count(), 0);
  EXPECT_EQ(none.capacity(), 0);
}

TEST(ExpertWaves, ARankWithoutTokensStillWorksForOthers) {
  const ExpertWaves second(Counts{1, 0, 2, 3, 0, 0, 0, 0}, {2, 1});
  ASSERT_EQ(second.count(), 1);
  EXPECT_EQ(second.rows(0), 5);
  EXPECT_EQ(second.on_the_way(0, false).out[0], (RowRange{0, 0}));
  EXPECT_EQ(second.on_the_way(0, false).in[0], (RowRange{0, 5}));
  EXPECT_EQ(second.on_the_way(0, true).most, (std::vector<int64_t>{5, 0}));
}

}  // namespace
}  // namespace lm
