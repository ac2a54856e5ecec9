// Which ends of a run are followed by another start, and with which ranks.
#include "launcher/cli/restarts.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

using Strings = std::vector<std::string>;

RunStatus end(Exit code, int killed_rank = -1, int64_t step = 5) {
  RunStatus out;
  out.state = "failed";
  out.exit_code = static_cast<int>(code);
  out.reason = killed_rank < 0 ? "error:TEST" : "killed:SIGKILL";
  out.step = step;
  out.killed_rank = killed_rank;
  return out;
}

Strings nothing_asked() {
  ADD_FAILURE() << "the GPUs were asked for";
  return {};
}

const StartWorkers kThreeGpus{3, {"A", "B", "C"}};

TEST(Restarts, OnlyALostRankAndOneKillForWantOfMemoryAreAnswered) {
  for (const Exit code : {Exit::kDone, Exit::kConfig, Exit::kDoesNotFit, Exit::kNoSpace, Exit::kNumerics,
                          Exit::kInternal, Exit::kStopped, Exit::kHostMemory}) {
    Restarts restarts(9, false, {3});
    EXPECT_FALSE(restarts.again(end(code), nothing_asked)) << static_cast<int>(code);
  }
  Restarts restarts(4, false, {3});
  EXPECT_TRUE(restarts.again(end(Exit::kHostMemory, 1), nothing_asked));
  EXPECT_FALSE(restarts.again(end(Exit::kHostMemory, 1), nothing_asked));
  EXPECT_TRUE(restarts.again(end(Exit::kNoProgress), nothing_asked));
  EXPECT_TRUE(restarts.again(end(Exit::kPeerLost, 1, 0), nothing_asked));
  EXPECT_TRUE(restarts.again(end(Exit::kPeerLost, 1, 0), nothing_asked));
  EXPECT_FALSE(restarts.again(end(Exit::kPeerLost, 1, 0), nothing_asked));
  EXPECT_EQ(restarts.ranks(), StartWorkers{3});  // not elastic
}

TEST(Restarts, ARankIsLeftOutWhenItIsKilledBeforeTheFirstStepOfTwoStartsInARow) {
  Restarts restarts(9, true, {3});
  const auto ranks_after = [&](const RunStatus& status) {
    EXPECT_TRUE(restarts.again(status, nothing_asked));
    return restarts.ranks().count;
  };
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 2, 0)), 3);
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 0)), 3);  // another one
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 4)), 3);  // after a step
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 0)), 3);
  EXPECT_EQ(ranks_after(end(Exit::kNoProgress)), 3);
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 0)), 3);
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 0)), 2);
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 0)), 2);  // of the two that are left, for the first time
  EXPECT_EQ(ranks_after(end(Exit::kPeerLost, 1, 0)), 1);
  EXPECT_EQ(restarts.asked(), 3);
}

TEST(Restarts, TheLastRankIsNotLeftOut) {
  Restarts restarts(9, true, {2});
  for (int i = 0; i < 2; ++i) restarts.again(end(Exit::kPeerLost, 0, 0), nothing_asked);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(restarts.again(end(Exit::kPeerLost, 0, 0), nothing_asked));
  EXPECT_EQ(restarts.ranks(), StartWorkers{1});
}

TEST(Restarts, EachStartHasTheGpusThatAreThereAndNoOther) {
  Restarts restarts(9, true, kThreeGpus);
  const auto ranks_with = [&](const Strings& there, const RunStatus& status = end(Exit::kPeerLost)) {
    EXPECT_TRUE(restarts.again(status, [&] { return there; }));
    EXPECT_EQ(restarts.ranks().count, std::ssize(restarts.ranks().gpus));
    return restarts.ranks().gpus;
  };
  EXPECT_EQ(ranks_with({"A", "B", "C"}), (Strings{"A", "B", "C"}));
  EXPECT_EQ(ranks_with({"A", "C", "D"}), (Strings{"A", "C"}));  // D was not the run's
  EXPECT_EQ(ranks_with({"C"}), (Strings{"C"}));
  EXPECT_EQ(ranks_with({"D", "C", "B", "A"}), (Strings{"A", "B", "C"}));  // they are back
  // None of the names is there: NVML may not answer any more, and the start itself finds out.
  EXPECT_EQ(ranks_with({"0", "1", "2"}), (Strings{"A", "B", "C"}));
  EXPECT_EQ(ranks_with({}), (Strings{"A", "B", "C"}));
}

TEST(Restarts, AnErrorIsAnsweredIfAGpuOfTheRunIsGone) {
  Restarts restarts(9, true, kThreeGpus);
  EXPECT_FALSE(restarts.again(end(Exit::kInternal), [] { return Strings{"A", "B", "C"}; }));
  EXPECT_FALSE(restarts.again(end(Exit::kInternal), [] { return Strings{"0", "1"}; }));  // of other names
  EXPECT_TRUE(restarts.again(end(Exit::kInternal), [] { return Strings{"A", "C"}; }));
  EXPECT_EQ(restarts.ranks(), (StartWorkers{2, {"A", "C"}}));
  // It is the run's no more.
  EXPECT_FALSE(restarts.again(end(Exit::kInternal), [] { return Strings{"A", "C"}; }));
  EXPECT_FALSE(restarts.again(end(Exit::kNumerics), [] { return Strings{"A"}; }));
  Restarts used_up(0, true, kThreeGpus);
  EXPECT_FALSE(used_up.again(end(Exit::kInternal), [] { return Strings{"A", "C"}; }));
}

TEST(Restarts, TheGpuOfARankThatIsLeftOutIsNotUsedAgain) {
  Restarts restarts(9, true, kThreeGpus);
  const auto all = [] { return Strings{"A", "B", "C"}; };
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(restarts.again(end(Exit::kPeerLost, 1, 0), all));
  EXPECT_EQ(restarts.ranks(), (StartWorkers{2, {"A", "C"}}));
  EXPECT_TRUE(restarts.again(end(Exit::kPeerLost), all));
  EXPECT_EQ(restarts.ranks(), (StartWorkers{2, {"A", "C"}}));
}

}  // namespace
}  // namespace lm
