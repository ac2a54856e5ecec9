// Every fault on every operation of a small workload, in the simulator: the end is what was written, or an
// error that names what it met. Nothing wrong is ever believed.
#include <gtest/gtest.h>

#include "base/error.h"
#include "support.h"
#include "tests/support/sim_disk.h"

namespace lm {
namespace {

using namespace offload_tests;

constexpr int64_t kBlock = 16 * 1024;

struct Outcome {
  std::optional<Error> error;
  WorkloadResult result;
  IoCounters counters;
  int64_t operations = 0;
  int64_t injected = 0;
};

class Faults : public ::testing::Test {
 protected:
  Outcome run(std::vector<SimFaultAt> faults, bool shuffle = false, uint64_t seed = 1) {
    // Two paths, so that offsets belong to the right one.
    SwapSpace space({{first_.path()}, {second_.path()}}, workload_bytes());
    PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
    SimSetup setup;
    setup.faults = std::move(faults);
    setup.seed = seed;
    setup.shuffle = shuffle;
    setup.depth = 4;
    SimDisk disk(space.files(), setup);
    IoQueue queue(space, [&] { return disk.make_engine(); }, kBlock,
                  {.tries = 6, .longest_pause = std::chrono::microseconds(100)});
    Outcome outcome;
    try {
      outcome.result = run_workload(space, queue, pool, seed);
    } catch (const Error& error) {
      outcome.error = error;
    }
    outcome.counters = queue.counters();
    outcome.operations = disk.operations();
    outcome.injected = disk.injected();
    return outcome;
  }

  // The fault on each operation in turn, once and for ever; `check` looks at each outcome.
  template <class Check>
  void on_every_operation(SimFault fault, const Check& check) {
    const int64_t operations = run({}).operations;
    ASSERT_GT(operations, 50);
    for (bool for_ever : {false, true}) {
      for (int64_t k = 0; k < operations; ++k) {
        const Outcome outcome = run({{fault, k, for_ever}});
        ASSERT_GE(outcome.injected, 1);
        check(outcome, for_ever);
        if (HasFailure()) {
          ADD_FAILURE() << "operation " << k << (for_ever ? ", for ever" : ", once");
          return;
        }
      }
    }
  }

  void expect_whole(const Outcome& outcome) {
    EXPECT_FALSE(outcome.error) << outcome.error->report();
    EXPECT_GT(outcome.result.chunks, 0u);
    EXPECT_EQ(outcome.result.wrong, 0u);
  }

  void expect_named(const Outcome& outcome, Exit code, const std::string& name) {
    ASSERT_TRUE(outcome.error) << "nothing was said about " << name;
    EXPECT_EQ(outcome.error->code(), code) << outcome.error->report();
    const ErrorText& text = outcome.error->text();
    for (const std::string& part :
         {name, std::string("array "), std::string("at offset "), std::string("bytes done")})
      EXPECT_NE(text.what.find(part), std::string::npos) << part << " is missing: " << text.what;
    EXPECT_TRUE(text.what.starts_with("read of ") || text.what.starts_with("write of ")) << text.what;
    EXPECT_TRUE(text.place.starts_with(first_.path() + "+") || text.place.starts_with(second_.path() + "+"))
        << text.place;
    EXPECT_FALSE(text.next.empty());
  }

  TemporaryDirectory first_, second_;
};

TEST_F(Faults, NoneIsARunWithoutRetries) {
  const Outcome outcome = run({});
  expect_whole(outcome);
  EXPECT_EQ(outcome.counters.retries, 0);
  EXPECT_EQ(outcome.counters.read_bytes, 3 * workload_bytes());
  EXPECT_EQ(outcome.counters.written_bytes, 3 * workload_bytes());
}

TEST_F(Faults, AnyOrderOfCompletionGivesTheSameBytes) {
  const Outcome plain = run({}, false, 5);
  for (uint64_t order = 0; order < 50; ++order) {
    Outcome outcome = run({}, true, 5 + 1000 * order);
    expect_whole(outcome);
    if (order == 0) {
      EXPECT_EQ(outcome.result.sums, plain.result.sums);
    }
  }
}

TEST_F(Faults, EioOfAReadIsTriedAgainAndOfAWriteIsAnError) {
  int healed = 0, failed_reads = 0, failed_writes = 0;
  on_every_operation(SimFault::kEio, [&](const Outcome& o, bool for_ever) {
    if (!o.error) {
      EXPECT_FALSE(for_ever);
      EXPECT_EQ(o.counters.retries, 1);
      ++healed;
      return expect_whole(o);
    }
    expect_named(o, Exit::kIo, "EIO");
    const bool read = o.error->text().what.starts_with("read of ");
    ++(read ? failed_reads : failed_writes);
    EXPECT_TRUE(for_ever || !read) << o.error->report();
    EXPECT_EQ(read, o.error->text().what.find("failed 4 times") != std::string::npos) << o.error->report();
  });
  EXPECT_GT(healed, 20);
  EXPECT_GT(failed_reads, 5);
  EXPECT_GT(failed_writes, 20);
}

TEST_F(Faults, EnospcIsAnErrorThatNamesWhatItMet) {
  on_every_operation(SimFault::kEnospc,
                     [&](const Outcome& o, bool) { expect_named(o, Exit::kNoSpace, "ENOSPC"); });
}

TEST_F(Faults, EintrIsTriedAgainAFewTimes) {
  on_every_operation(SimFault::kEintr, [&](const Outcome& o, bool for_ever) {
    if (for_ever) return expect_named(o, Exit::kIo, "EINTR");
    expect_whole(o);
    EXPECT_EQ(o.counters.retries, 1);
  });
}

TEST_F(Faults, EagainIsTriedAgainAFewTimes) {
  on_every_operation(SimFault::kEagain, [&](const Outcome& o, bool for_ever) {
    if (for_ever) return expect_named(o, Exit::kIo, "EAGAIN");
    expect_whole(o);
    EXPECT_EQ(o.counters.retries, 1);
  });
}

TEST_F(Faults, ShortTransfersAreContinuedFromWhereTheyStopped) {
  int64_t continued = 0;
  on_every_operation(SimFault::kShort, [&](const Outcome& o, bool for_ever) {
    // A request of one alignment unit that stays short for ever makes no progress, and is an error in the
    // end.
    if (for_ever && o.error) return expect_named(o, Exit::kIo, "EIO");
    expect_whole(o);
    continued += o.counters.retries;
  });
  EXPECT_GT(continued, 100);
}

TEST_F(Faults, AnEarlyEndIsAnError) {
  on_every_operation(SimFault::kZero,
                     [&](const Outcome& o, bool) { expect_named(o, Exit::kIo, "ended early"); });
}

TEST_F(Faults, MoreThanWasAskedIsAnError) {
  on_every_operation(SimFault::kLong,
                     [&](const Outcome& o, bool) { expect_named(o, Exit::kIo, "the engine reports"); });
}

TEST_F(Faults, ALateCompletionOnlyTakesLonger) {
  for (int64_t k = 0; k < 20; ++k) expect_whole(run({{SimFault::kDelay, 5 * k, false}}));
}

TEST_F(Faults, ResultsThatNobodyAskedForAreABugInTheEngine) {
  for (SimFault fault : {SimFault::kDuplicate, SimFault::kUnknown}) {
    on_every_operation(fault, [&](const Outcome& o, bool) {
      ASSERT_TRUE(o.error);
      EXPECT_EQ(o.error->code(), Exit::kInternal) << o.error->report();
    });
  }
}

TEST_F(Faults, SilentOnesOnAnyOperationAreFoundByTheChecksums) {
  // A write's fault shows when its place is read again, unless a later write has made it good; a read's at
  // once.
  const int64_t operations = run({}).operations;
  for (SimFault fault :
       {SimFault::kBitFlip, SimFault::kDroppedWrite, SimFault::kStrayWrite, SimFault::kStrayRead}) {
    int64_t injected = 0;
    for (int64_t k = 0; k < operations; ++k) {
      const Outcome outcome = run({{fault, k, false}});
      ASSERT_FALSE(outcome.error);
      injected += outcome.injected;
      EXPECT_EQ(outcome.result.wrong > 0, outcome.injected > 0) << "operation " << k;
    }
    EXPECT_GT(injected, operations / 4) << static_cast<int>(fault);
  }
}

TEST(SilentFaults, ThousandBitFlipsAndHundredStaleOrSwappedChunksAreAllFound) {
  const TemporaryDirectory directory;
  constexpr int64_t kChunks = 100, kBytes = kChunks * kChunk;
  SwapSpace space({{directory.path()}}, kBytes);
  PinnedPool pool(DeviceType::kCpu, 2 * kBytes);
  const Extent extent = space.allocate(kBytes);
  PinnedBlock out = pool.lease(kBytes), in = pool.lease(kBytes);
  SimDisk disk(space.files(), {.faults = {}, .seed = 3});
  IoQueue queue(
      space, [&] { return disk.make_engine(); }, kChunk);
  const auto write = [&](uint64_t seed) {
    fill(out.bytes(), seed);
    queue.wait(queue.write(extent, out.data(), kBytes, "chunks"));
    return chunk_checksums(out.bytes());
  };
  const auto wrong = [&](const std::vector<uint64_t>& sums) {
    queue.wait(queue.read(extent, in.data(), kBytes, "chunks"));
    return wrong_chunks(in.bytes(), sums).size();
  };
  const std::vector<uint64_t> sums = write(1);
  EXPECT_EQ(wrong(sums), 0u);
  disk.plan_faults({{SimFault::kBitFlip, 0, true}});
  for (int i = 0; i < 10; ++i) EXPECT_EQ(wrong(sums), static_cast<size_t>(kChunks));
  EXPECT_EQ(disk.injected(), 1000);
  disk.plan_faults({});
  EXPECT_EQ(wrong(sums), 0u);
  disk.plan_faults({{SimFault::kStrayRead, 0, true}});
  EXPECT_EQ(wrong(sums), static_cast<size_t>(kChunks));
  // The same place, last time's bytes.
  disk.plan_faults({{SimFault::kDroppedWrite, 0, true}});
  const std::vector<uint64_t> later = write(2);
  disk.plan_faults({});
  EXPECT_EQ(wrong(later), static_cast<size_t>(kChunks));
  EXPECT_EQ(wrong(sums), 0u);
}

}  // namespace
}  // namespace lm
