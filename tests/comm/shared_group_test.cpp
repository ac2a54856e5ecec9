// Ranks as threads over one region, as separate mappings of it, and as processes.
#include "comm/shared_group.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <latch>
#include <string>
#include <thread>

#include "base/error.h"
#include "group_cases.h"
#include "stopped.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

using Body = std::function<void(SharedGroup&)>;

// Each rank in a thread of its own; the error of the first that threw, by rank.
std::vector<std::string> with_ranks(int ranks, const Body& body, int64_t staging = SharedRegion::kStaging,
                                    double silence = 20, double late = SharedGroup::kLate) {
  SharedRegion region = SharedRegion::create(ranks, staging);
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup group(region, r, silence, late);
        body(group);
      } catch (const Error& error) {
        errors[static_cast<size_t>(r)] = std::to_string(static_cast<int>(error.code())) + " " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

class SharedGroups : public ::testing::TestWithParam<int> {};

TEST_P(SharedGroups, AllGatherGivesEveryoneEveryRun) {
  expect_none(with_ranks(GetParam(), all_gather_gives_everyone_every_run, int64_t{1} << 16));
}

TEST_P(SharedGroups, ReduceScatterBringsEveryRankItsRunOfAll) {
  expect_none(with_ranks(GetParam(), reduce_scatter_brings_every_rank_its_run_of_all, int64_t{1} << 17));
}

TEST_P(SharedGroups, AllToAllBringsEveryRankWhatEachHasForIt) {
  expect_none(with_ranks(GetParam(), all_to_all_brings_every_rank_what_each_has_for_it, int64_t{1} << 17));
}

TEST_P(SharedGroups, AReduceScatterAmongSomeBringsTheirs) {
  expect_none(with_ranks(GetParam(), a_reduce_scatter_among_some_brings_theirs, int64_t{1} << 17));
}

TEST_P(SharedGroups, AReduceScatterMayAddWhereTheArrayIs) {
  expect_none(with_ranks(GetParam(), a_reduce_scatter_may_add_where_the_array_is, int64_t{1} << 17));
}

TEST_P(SharedGroups, GatherBroadcastAndCountWhatIsSent) {
  expect_none(with_ranks(GetParam(), [](SharedGroup& group) {
    gather_broadcast_and_count_what_is_sent(group, [&] { return group.sent_bytes(); });
  }));
}

TEST_P(SharedGroups, WhatIsSharedCrossesOncePerMachine) {
  const auto body = [](SharedGroup& group) { what_is_shared_crosses_once_per_machine(group, group); };
  expect_none(with_ranks(GetParam(), body, int64_t{1} << 17));
}

TEST_P(SharedGroups, GroupsShareTheirOwnAndCopies) {
  const auto body = [](SharedGroup& group) { groups_share_their_own_and_copies(group, group); };
  expect_none(with_ranks(GetParam(), body, int64_t{1} << 17));
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedGroups, ::testing::Values(1, 2, 3, 4, 8));

// Who is not told waits, as nobody is ever found silent.
TEST(SharedGroupFailures, ARankThatHasEndedEndsTheOthers) {
  constexpr double kForEver = 1e9;
  SharedRegion region = SharedRegion::create(3);
  std::thread end([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    region.end();
  });
  for (int rank : {0, 1}) {
    SharedGroup group(region, rank, kForEver);
    try {
      group.barrier("gradients of block 3");
      ADD_FAILURE() << "came through";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kPeerLost);
      EXPECT_NE(std::string(error.what()).find("gradients of block 3"), std::string::npos);
    }
  }
  end.join();
}

TEST(SharedGroupFailures, ARankThatDoesNotComeIsNamed) {
  const std::vector<std::string> errors = with_ranks(
      3,
      [](SharedGroup& group) {
        group.barrier("first");
        if (group.rank() != 1) group.barrier("second");
      },
      SharedRegion::kStaging, 0.5);
  EXPECT_EQ(errors[1], "");
  // One finds it, and the other is told either way.
  const std::string all = errors[0] + errors[2];
  EXPECT_NE(all.find(", in \"second\" (collective 2)"), std::string::npos) << all;
  EXPECT_NE(all.find("it was last in \"first\" (collective 1)"), std::string::npos) << all;
  EXPECT_NE(all.find("41 no heartbeat from rank 1 for "), std::string::npos) << all;
  for (int rank : {0, 2}) EXPECT_NE(errors[static_cast<size_t>(rank)], "");
}

// They begin to wait, and so to look, in the same microseconds.
TEST(SharedGroupFailures, OfAllThatWaitOneSaysWhoIsLost) {
  const int turns = test::counts(5, 30);
  for (int i = 0; i < turns; ++i) {
    std::latch begin(24);
    const std::vector<std::string> errors = with_ranks(
        24,
        [&](SharedGroup& group) {
          begin.arrive_and_wait();
          if (group.rank() != 1) group.barrier("all");
        },
        SharedRegion::kStaging, 0.3);
    const auto begins = [&](const char* code) {
      return std::ranges::count_if(errors, [&](const std::string& error) { return error.starts_with(code); });
    };
    EXPECT_EQ(begins("41 no heartbeat from rank 1 "), 1);
    EXPECT_EQ(begins("40 another rank has ended"), 22);
  }
}

TEST(SharedGroupFailures, ARankThatWorksForLongIsWaitedFor) {
  const std::vector<std::string> errors = with_ranks(
      2,
      [](SharedGroup& group) {
        if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3000));
        group.barrier("after long work");
      },
      SharedRegion::kStaging, 1.5);
  expect_none(errors);
}

TEST(SharedGroupFailures, ARankThatLivesAndNeverComesIsNamed) {
  const std::vector<std::string> errors = with_ranks(
      2,
      [](SharedGroup& group) {
        if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        group.barrier("evaluation");
      },
      SharedRegion::kStaging, 20, 1);
  EXPECT_TRUE(errors[0].starts_with("41 rank 1 did not enter \"evaluation\" (collective 1)")) << errors[0];
}

// Several pairs: of some the one has seen the other's last heartbeat before, and of some it sees it after.
TEST(SharedGroupFailures, TheTimeInWhichAllWereStoppedIsNotWaited) {
  // Far more than the second of work and the second in which the processes go on one after the other, and
  // less than they stand still.
  constexpr int kPatience = 6;
  std::vector<SharedRegion> regions;
  for (int i = 0; i < 6; ++i) regions.push_back(SharedRegion::create(2));
  std::vector<Work> processes;
  for (int rank : {0, 1}) {
    for (SharedRegion& region : regions) {
      processes.push_back([&region, rank]() -> std::vector<std::string> {
        try {
          SharedGroup group(region, rank, kPatience, kPatience);
          if (rank == 1) work_a_second();
          group.barrier("after a stop");
        } catch (const Error& error) {
          return {error.what()};
        }
        return {};
      });
    }
  }
  expect_go_on_after(std::chrono::seconds(kPatience + 1), processes);
}

TEST(SharedGroupWaits, WaitsForAMeetingUntilAllHaveCome) {
  SharedRegion region = SharedRegion::create(2);
  SharedGroup first(region, 0), second(region, 1);
  EXPECT_FALSE(first.waits());
  std::thread other([&] { second.barrier("meeting"); });
  while (!second.waits()) std::this_thread::yield();
  EXPECT_FALSE(first.waits());
  first.barrier("meeting");
  other.join();
  EXPECT_FALSE(first.waits());
  EXPECT_FALSE(second.waits());
}

TEST(SharedGroupFailures, RanksThatComeForDifferentThingsSayWhich) {
  const std::vector<std::string> errors = with_ranks(
      2, [](SharedGroup& group) { group.barrier(group.rank() == 0 ? "gather of weights" : "evaluation"); });
  EXPECT_NE(errors[0].find("rank 1 is in \"evaluation\", this one in \"gather of weights\""),
            std::string::npos);
  EXPECT_NE(errors[1].find("rank 0 is in \"gather of weights\""), std::string::npos);
}

TEST(SharedGroupFailures, TogetherAllFailOrNone) {
  const std::vector<std::string> errors = with_ranks(3, [](SharedGroup& group) {
    together(group, "easy work", [] {});
    EXPECT_EQ(gather_texts(group, "texts", std::string(static_cast<size_t>(group.rank()), 'x')),
              (std::vector<std::string>{"", "x", "xx"}));
    together(group, "hard work", [&] {
      if (group.rank() != 1) return;
      throw Error(Exit::kNoSpace, {.area = "X", .what = "full", .place = "here", .next = "", .kept = ""});
    });
  });
  EXPECT_EQ(errors[0], "20 hard work has failed at rank 1");
  EXPECT_EQ(errors[1], "20 full at here");
  EXPECT_EQ(errors[2], "20 hard work has failed at rank 1");
}

TEST(SharedGroupFailures, WhatSeveralFailByTheFirstOfThemSays) {
  const std::vector<std::string> errors = with_ranks(4, [](SharedGroup& group) {
    together(group, "the plan", [&] {
      const char* const what = group.rank() == 3 ? "another" : "too large";
      if (group.rank() > 0)
        throw Error(Exit::kDoesNotFit, {.area = "X", .what = what, .place = "", .next = "", .kept = ""});
    });
  });
  EXPECT_EQ(errors[1], "12 too large");
  EXPECT_EQ(errors[3], "12 another");
  for (const size_t r : {0, 2}) EXPECT_EQ(errors[r], "12 the plan has failed at rank 1");
}

TEST(SharedGroupFailures, AnotherFileIsNoRegion) {
  EXPECT_THROW(SharedRegion::attach(-1), Error);
  EXPECT_THROW(SharedRegion::attach(0), Error);
}

TEST(SharedGroup, RanksMayBeProcesses) {
  const int ranks = 3;
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      SharedRegion own = SharedRegion::attach(dup(region.fd()));
      SharedGroup group(own, r);
      int64_t sum = 0;
      for (int64_t i = 0; i < 500; ++i) {
        for (const int64_t x : group.gather("numbers", i * (r + 1))) sum += x;
      }
      _exit(sum == 6 * 499 * 500 / 2 ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

TEST(LocalGroup, HasEverythingAlready) {
  LocalGroup group;
  int value = 5;
  const ByteRange all[] = {{0, sizeof value}};
  group.all_gather("share", reinterpret_cast<std::byte*>(&value), all);
  EXPECT_EQ(value, 5);
  int seen = 0;
  group.reduce_scatter("exchange", reinterpret_cast<std::byte*>(&value), all,
                       [&](int64_t, int64_t bytes, std::span<const std::byte* const> from) {
                         ASSERT_EQ(bytes, 4);
                         std::memcpy(&seen, from[0], sizeof seen);
                       });
  EXPECT_EQ(seen, 5);
  EXPECT_EQ(group.gather("gather", 3), std::vector<int>{3});
}

}  // namespace
}  // namespace lm
