// Under `mpirun -n N`, which tests/comm/CMakeLists.txt calls: each process is a rank.
#include "comm/mpi_group.h"

#include <gtest/gtest.h>

#include <memory>

#include "base/error.h"
#include "base/process.h"
#include "group_cases.h"

namespace lm {
namespace {

class MpiGroups : public ::testing::Test {
 protected:
  // MPI is joined and left once per process.
  static void SetUpTestSuite() {
    link_ = std::make_unique<MpiLink>(
        LinkSetup{.api = load_mpi(beside_this_program("lmlaunch-mpi.so")), .silence = 30, .host = "here"});
  }
  static void TearDownTestSuite() {
    MpiGroup(*link_).barrier("end");
    link_->leave();
    link_.reset();
  }
  static std::unique_ptr<MpiLink> link_;
};
std::unique_ptr<MpiLink> MpiGroups::link_;

TEST_F(MpiGroups, AllGatherGivesEveryoneEveryRun) {
  MpiGroup group(*link_);
  all_gather_gives_everyone_every_run(group);
}

TEST_F(MpiGroups, ReduceScatterBringsEveryRankItsRunOfAll) {
  MpiGroup group(*link_, int64_t{1} << 15);  // in several parts
  reduce_scatter_brings_every_rank_its_run_of_all(group);
}

TEST_F(MpiGroups, AllToAllBringsEveryRankWhatEachHasForIt) {
  MpiGroup group(*link_, int64_t{1} << 15);
  all_to_all_brings_every_rank_what_each_has_for_it(group);
}

TEST_F(MpiGroups, AReduceScatterAmongSomeBringsTheirs) {
  MpiGroup group(*link_, int64_t{1} << 15);
  a_reduce_scatter_among_some_brings_theirs(group);
}

TEST_F(MpiGroups, AReduceScatterMayAddWhereTheArrayIs) {
  MpiGroup group(*link_, int64_t{1} << 15);
  a_reduce_scatter_may_add_where_the_array_is(group);
}

TEST_F(MpiGroups, GatherBroadcastAndCountWhatIsSent) {
  MpiGroup group(*link_);
  gather_broadcast_and_count_what_is_sent(group, [&] { return group.sent_bytes(); });
}

TEST_F(MpiGroups, WhatIsSharedCrossesOncePerMachine) {
  MpiGroup group(*link_);
  what_is_shared_crosses_once_per_machine(group, group);
}

TEST_F(MpiGroups, GroupsShareTheirOwnAndCopies) {
  MpiGroup group(*link_);
  groups_share_their_own_and_copies(group, group);
}

TEST_F(MpiGroups, TogetherAllFailOrNone) {
  MpiGroup group(*link_);
  together(group, "easy work", [] {});
  try {
    together(group, "hard work", [&] {
      if (group.rank() != group.ranks() - 1) return;
      throw Error(Exit::kNoSpace, {.area = "X", .what = "full", .place = "here", .next = "", .kept = ""});
    });
    ADD_FAILURE() << "came through";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kNoSpace);
  }
}

TEST(MpiPlugin, SaysWhichOpenMpi) {
  EXPECT_EQ(mpi_version(beside_this_program("lmlaunch-mpi.so")).rfind("Open MPI v", 0), 0U);
  EXPECT_THROW(load_mpi(""), Error);
  EXPECT_THROW(load_mpi("/nowhere/lmlaunch-mpi.so"), Error);
}

}  // namespace
}  // namespace lm
