// Writes that a disk refuses go elsewhere, and are found there; only where nothing takes them is it an error.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/bytes.h"
#include "base/error.h"
#include "offload/relocations.h"
#include "support.h"
#include "tests/support/counts.h"
#include "tests/support/sim_disk.h"

namespace lm {
namespace {

using namespace offload_tests;

// Against a table with a row for every byte.
TEST(Relocations, FindEveryByteWhereItWasLastPut) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    Relocations moved;
    std::map<std::pair<int, int64_t>, std::pair<int, int64_t>> bytes;
    const auto place_of = [&](int file, int64_t offset) {
      const auto found = bytes.find({file, offset});
      return found == bytes.end() ? std::pair{file, offset} : found->second;
    };
    for (int move = 0; move < 12; ++move) {
      const int file = static_cast<int>(random() % 2);
      const int64_t offset = random() % 40, count = 1 + random() % 12, to = 1000 * (move + 1);
      moved.add(file, offset, {file + 2, to, count});
      for (int64_t i = 0; i < count; ++i) bytes[{file, offset + i}] = {file + 2, to + i};
      for (int f = 0; f < 2; ++f) {
        for (int64_t from = 0; from < 55;) {
          const ExtentPiece run = moved.find(f, from, 7);
          ASSERT_TRUE(run.bytes >= 1 && run.bytes <= 7);
          for (int64_t i = 0; i < run.bytes; ++i)
            ASSERT_EQ(place_of(f, from + i), std::pair(run.file, run.offset + i)) << "byte " << from + i;
          from += run.bytes;
        }
      }
    }
  }
}

class MovedWrites : public ::testing::Test {
 protected:
  static constexpr int64_t kBlock = 16 * 1024;

  struct Outcome {
    std::optional<Error> error;
    WorkloadResult result;
    IoCounters counters;
    int64_t operations = 0;
  };
  Outcome run(std::vector<SimFaultAt> faults, int64_t spare, uint64_t seed = 1) {
    SwapSpace space({{first_.path()}, {second_.path()}}, workload_bytes(), spare);
    PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
    SimDisk disk(space.files(), {.faults = std::move(faults), .seed = seed, .shuffle = true, .depth = 4});
    IoQueue queue(
        space, [&] { return disk.make_engine(); }, kBlock);
    Outcome out;
    try {
      out.result = run_workload(space, queue, pool, seed);
    } catch (const Error& error) {
      out.error = error;
    }
    out.counters = queue.counters();
    out.operations = disk.operations();
    return out;
  }

  TemporaryDirectory first_, second_;
};

TEST_F(MovedWrites, AreReadBackFromWhereTheyWent) {
  const Outcome plain = run({}, 4 * kBlock);
  for (const SimFault fault : {SimFault::kEio, SimFault::kEnospc}) {
    int64_t moved = 0;
    for (int64_t k = 0; k < plain.operations; ++k) {
      const Outcome outcome = run({{fault, k, false}}, 4 * kBlock);
      const bool refused_read = outcome.error && outcome.error->text().what.starts_with("read of ");
      if (refused_read) continue;  // ENOSPC of a read is no matter of room
      ASSERT_FALSE(outcome.error) << outcome.error->report();
      EXPECT_EQ(outcome.result.wrong, 0u);
      EXPECT_EQ(outcome.result.sums, plain.result.sums) << k;
      EXPECT_EQ(outcome.counters.written_bytes, plain.counters.written_bytes);
      moved += outcome.counters.retries;
    }
    EXPECT_GT(moved, 20);
  }
}

// What is moved may fail where it went, and the rest of a write that was short may be what is moved.
TEST_F(MovedWrites, AreMovedAgainAndInPart) {
  const Outcome plain = run({}, 8 * kBlock);
  for (const SimFault first : {SimFault::kEio, SimFault::kShort}) {
    int64_t moved = 0;
    for (int64_t k = 0; k < plain.operations; k += test::counts(4, 1)) {
      // The operation in which it is tried again is one of the next.
      for (int64_t later = 1; later < 6; ++later) {
        const Outcome outcome = run({{first, k, false}, {SimFault::kEio, k + later, false}}, 8 * kBlock);
        ASSERT_FALSE(outcome.error) << outcome.error->report();
        EXPECT_EQ(outcome.result.wrong, 0u);
        ASSERT_EQ(outcome.result.sums, plain.result.sums) << k << " and " << later << " later";
        moved += outcome.counters.retries;
      }
    }
    EXPECT_GT(moved, test::counts(25, 100));
  }
}

TEST_F(MovedWrites, LeaveAPathThatTakesNone) {
  // The whole of one path, more than once: what is written again is written where it went.
  const Outcome plain = run({}, 0);
  const Outcome outcome = run({{SimFault::kEio, 0, true, 0}}, workload_bytes());
  ASSERT_FALSE(outcome.error) << outcome.error->report();
  EXPECT_EQ(outcome.result.sums, plain.result.sums);
  EXPECT_GT(outcome.counters.retries, 5);
}

TEST_F(MovedWrites, AreAnErrorWhereNothingTakesThem) {
  for (const auto& [fault, code, name] : {std::tuple(SimFault::kEio, Exit::kIo, "EIO"),
                                          std::tuple(SimFault::kEnospc, Exit::kNoSpace, "ENOSPC")}) {
    for (const int64_t spare : {int64_t{0}, 4 * kBlock}) {
      const Outcome outcome = run({{fault, 0, true}}, spare);
      ASSERT_TRUE(outcome.error);
      EXPECT_EQ(outcome.error->code(), code) << outcome.error->report();
      EXPECT_NE(outcome.error->text().what.find(name), std::string::npos);
      EXPECT_NE(outcome.error->text().what.find("device "), std::string::npos);
      // Tried in its own place, then in two others.
      EXPECT_EQ(outcome.counters.retries > 0, spare > 0);
    }
  }
}

TEST(SpareRoom, IsOfEachFileAndOfTheOthersFirst) {
  const TemporaryDirectory a, b;
  SwapSpace space({{a.path()}, {b.path(), 1, 8 * kMiB}}, 16 * kMiB, kMiB);
  // The second path's limit leaves none.
  EXPECT_EQ(space.capacity(), 16 * kMiB);
  EXPECT_EQ(space.files()[0].bytes, 9 * kMiB);
  EXPECT_EQ(space.files()[1].bytes, 8 * kMiB);
  const auto first = space.spare(1, 768 * kKiB);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->file, 0);
  EXPECT_EQ(first->offset, 8 * kMiB);
  EXPECT_FALSE(space.spare(0, 512 * kKiB));
  const auto second = space.spare(0, 256 * kKiB);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->offset, 8 * kMiB + 768 * kKiB);
  EXPECT_FALSE(space.spare(0, 4096));
  // And an extent never lies there.
  EXPECT_EQ(space.allocate(16 * kMiB).pieces.size(), 2u);
  EXPECT_EQ(space.allocated(), space.capacity());
}

}  // namespace
}  // namespace lm
