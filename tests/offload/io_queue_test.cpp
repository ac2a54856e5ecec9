#include "offload/io_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "support.h"
#include "tests/support/sim_disk.h"
#include "tests/support/until.h"

namespace lm {
namespace {

using namespace offload_tests;

// Remembers what an engine was asked for.
class Recorder final : public IoEngine {
 public:
  Recorder(std::unique_ptr<IoEngine> engine, std::vector<IoRequest>& requests)
      : engine_(std::move(engine)), requests_(requests) {}
  int depth() const override { return engine_->depth(); }
  void submit(const IoRequest& request) override {
    requests_.push_back(request);
    engine_->submit(request);
  }
  void wait(std::vector<IoResult>& results) override { engine_->wait(results); }
  void wake() override { engine_->wake(); }
  std::string description() const override { return engine_->description(); }

 private:
  std::unique_ptr<IoEngine> engine_;
  std::vector<IoRequest>& requests_;
};

// A simulated disk's time that the test moves. Any thread may look.
class MovedClock {
 public:
  SimSetup::Clock::time_point now() const { return SimSetup::Clock::time_point(passed_.load()); }
  void move(SimSetup::Clock::duration by) { passed_ = passed_.load() + by; }

 private:
  std::atomic<SimSetup::Clock::duration> passed_ = SimSetup::Clock::duration::zero();
};

Exit code_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.code();
  }
  return Exit::kDone;
}

class Queue : public ::testing::Test {
 protected:
  static constexpr int64_t kBlock = 64 * kKiB;

  std::unique_ptr<IoQueue> make(SimSetup setup) {
    disk_ = std::make_unique<SimDisk>(space_.files(), std::move(setup));
    return std::make_unique<IoQueue>(
        space_, [this] { return std::make_unique<Recorder>(disk_->make_engine(), requests_); }, kBlock);
  }

  TemporaryDirectory first_, second_;
  SwapSpace space_{{{first_.path()}, {second_.path()}}, 16 * kMiB};
  PinnedPool pool_{DeviceType::kCpu, 16 * kMiB};
  std::unique_ptr<SimDisk> disk_;
  std::vector<IoRequest> requests_;  // of the I/O thread until the queue's end
};

TEST_F(Queue, EveryEngineGivesTheSameBytes) {
  std::vector<std::vector<uint64_t>> sums;
  for (IoEngineKind kind : {IoEngineKind::kAuto, IoEngineKind::kThreads}) {
    SwapSpace space({{first_.path()}, {second_.path()}}, workload_bytes());
    PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
    const auto queue = make_queue(space, pool, kind);
    SCOPED_TRACE(queue->description());
    const WorkloadResult result = run_workload(space, *queue, pool, 9);
    EXPECT_EQ(result.wrong, 0u);
    sums.push_back(result.sums);
  }
  SwapSpace space({{first_.path()}, {second_.path()}}, workload_bytes());
  PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
  SimDisk disk(space.files());
  IoQueue queue(
      space, [&] { return disk.make_engine(); }, kBlock);
  sums.push_back(run_workload(space, queue, pool, 9).sums);
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_EQ(sums[0], sums[2]);
}

TEST_F(Queue, CutsTransfersIntoBlocksAndLetsAllPathsWorkOnEach) {
  const Extent extent = space_.allocate(2 * kMiB);
  PinnedBlock block = pool_.lease(2 * kMiB);
  auto queue = make({.faults = {}, .depth = 4});
  queue->wait(queue->write(extent, block.data(), 2 * kMiB, "x"));
  queue.reset();
  ASSERT_EQ(requests_.size(), 32u);
  for (size_t i = 0; i < requests_.size(); ++i) {
    EXPECT_LE(requests_[i].bytes, kBlock);
    EXPECT_EQ(requests_[i].file, static_cast<int>(i % 2));
  }
}

TEST_F(Queue, WaitsForWhatATransferComesAfter) {
  const Extent extent = space_.allocate(kMiB);
  PinnedBlock block = pool_.lease(kMiB), other = pool_.lease(kMiB);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    auto queue = make({.faults = {{SimFault::kDelay, 3, false}}, .seed = seed, .shuffle = true, .depth = 8});
    // write a, read it into `other`, write `other` elsewhere: each only right after the one before
    fill(block.bytes(), seed);
    fill(other.bytes(), seed + 100);
    const Ticket a = queue->write(extent, block.data(), kMiB, "a");
    const Ticket b = queue->read(extent, other.data(), kMiB, "b", {{a}});
    const Ticket c = queue->write(extent, other.data(), kMiB, "c", {{a, b}});
    queue->wait(c);
    EXPECT_TRUE(queue->done(a));
    EXPECT_TRUE(queue->done(b));
    EXPECT_EQ(std::memcmp(block.data(), other.data(), kMiB), 0);
  }
}

// Two threads ask for transfers, and whether theirs are done, while the I/O thread ends others.
TEST_F(Queue, MayBeAskedByAnyThreadWhatIsDone) {
  auto queue = make({.faults = {{SimFault::kDelay, 3, false}}, .seed = 5, .shuffle = true, .depth = 8});
  const auto ask = [&](const Extent& extent, std::span<std::byte> there, std::span<std::byte> back,
                       uint64_t seed) {
    const auto until_done = [&](Ticket ticket) {
      while (!queue->done(ticket)) std::this_thread::yield();
    };
    for (uint64_t i = 0; i < 20; ++i) {
      fill(there, seed + i);
      const Ticket write = queue->write(extent, there.data(), std::ssize(there), "w");
      until_done(queue->read(extent, back.data(), std::ssize(back), "r", {{write}}));
      EXPECT_EQ(std::memcmp(there.data(), back.data(), there.size()), 0);
    }
  };
  std::vector<Extent> extents;
  std::vector<PinnedBlock> blocks;
  for (int i = 0; i < 2; ++i) extents.push_back(space_.allocate(256 * kKiB));
  for (int i = 0; i < 4; ++i) blocks.push_back(pool_.lease(256 * kKiB));
  std::thread other(ask, extents[0], blocks[0].bytes(), blocks[1].bytes(), 100);
  ask(extents[1], blocks[2].bytes(), blocks[3].bytes(), 200);
  other.join();
}

TEST_F(Queue, ARowOfWritesDoesNotHoldUpARead) {
  const Extent extent = space_.allocate(8 * kMiB), small = space_.allocate(256 * kKiB);
  PinnedBlock block = pool_.lease(8 * kMiB), other = pool_.lease(256 * kKiB);
  MovedClock clock;
  SimSetup setup;
  setup.depth = 4;
  setup.write_bytes_per_s = 5e6;  // 128 requests of 13 ms
  setup.read_bytes_per_s = 200e6;
  setup.now = [&] { return clock.now(); };
  auto queue = make(setup);
  const Ticket write = queue->write(extent, block.data(), 8 * kMiB, "long");
  ASSERT_TRUE(test::until([&] { return disk_->operations() == 4; }));
  const Ticket read = queue->read(small, other.data(), 256 * kKiB, "short");
  ASSERT_TRUE(test::until([&] { return clock.move(std::chrono::milliseconds(1)), queue->done(read); }));
  // Its four requests went to the disk among the next writes, and not behind the last one.
  EXPECT_LT(disk_->operations(), 32);
  EXPECT_FALSE(queue->done(write));
  ASSERT_TRUE(test::until([&] { return clock.move(std::chrono::milliseconds(50)), queue->done(write); }));
}

// 8 MiB each way at 10 MB/s: 0.84 s where both ways are free, twice that where they share a link.
TEST_F(Queue, TheSimulatedDiskHasTheSpeedThatItWasGiven) {
  constexpr int64_t kRequests = 8 * kMiB / kBlock;
  for (const bool share : {false, true}) {
    MovedClock clock;
    SimSetup setup;
    setup.depth = 2 * kRequests;
    if (share) {
      setup.both_bytes_per_s = 10e6;
    } else {
      setup.read_bytes_per_s = setup.write_bytes_per_s = 10e6;
    }
    setup.now = [&] { return clock.now(); };
    SimDisk disk(space_.files(), setup);
    const auto engine = disk.make_engine();
    const PinnedBlock block = pool_.lease(kBlock);
    for (uint64_t id = 0; id < 2 * kRequests; ++id) {
      engine->submit({.direction = id % 2 == 0 ? IoDirection::kWrite : IoDirection::kRead,
                      .file = 0,
                      .offset = 0,
                      .memory = block.data(),
                      .bytes = kBlock,
                      .id = id});
    }
    std::vector<IoResult> results;
    int ms = 0;
    for (; results.size() < 2 * kRequests && ms < 5000; ++ms) {
      clock.move(std::chrono::milliseconds(1));
      engine->wake();
      engine->wait(results);
    }
    EXPECT_NEAR(ms, (share ? 2 : 1) * 8 * kMiB / 10e3, 2);
  }
}

TEST_F(Queue, KeepsTheFirstFailureForEveryLaterCall) {
  const Extent extent = space_.allocate(kMiB);
  PinnedBlock block = pool_.lease(kMiB);
  auto queue = make({.faults = {{SimFault::kEio, 3, false}, {SimFault::kEnospc, 4, true}}, .depth = 1});
  const Ticket before = queue->write(extent, block.data(), 2 * kBlock, "before");
  queue->wait(before);
  const Ticket ticket = queue->write(extent, block.data(), kMiB, "after");
  EXPECT_EQ(code_of([&] { queue->wait(ticket); }), Exit::kIo);
  EXPECT_EQ(code_of([&] { queue->wait(before); }), Exit::kIo);
  EXPECT_EQ(code_of([&] { queue->wait(0); }), Exit::kIo);
  EXPECT_EQ(code_of([&] { queue->done(ticket); }), Exit::kIo);
  EXPECT_EQ(code_of([&] { queue->drain(); }), Exit::kIo);
  EXPECT_EQ(code_of([&] { queue->read(extent, block.data(), 4096, "later"); }), Exit::kIo);
}

TEST_F(Queue, ReadsThreeTimesMoreWhatTheDiskFailsToRead) {
  const Extent extent = space_.allocate(kBlock);
  PinnedBlock block = pool_.lease(kBlock);
  const auto read_after = [&](int64_t errors) {
    std::vector<SimFaultAt> faults;
    for (int64_t k = 0; k < errors; ++k) faults.push_back({SimFault::kEio, 1 + k, false});
    auto queue = make({.faults = faults, .depth = 1});
    std::memset(block.data(), 7, kBlock);
    queue->wait(queue->write(extent, block.data(), kBlock, "x"));
    std::memset(block.data(), 0, kBlock);
    const Exit code = code_of([&] { queue->wait(queue->read(extent, block.data(), kBlock, "x")); });
    EXPECT_EQ(queue->counters().retries, std::min<int64_t>(errors, 3));
    EXPECT_EQ(block.data()[kBlock - 1] == std::byte{7}, code == Exit::kDone);
    return code;
  };
  EXPECT_EQ(read_after(3), Exit::kDone);
  EXPECT_EQ(read_after(4), Exit::kIo);
}

TEST_F(Queue, TouchesNoMemoryOnceAFailureIsKnown) {
  const Extent extent = space_.allocate(4 * kMiB);
  SimSetup setup;
  setup.faults = {{SimFault::kZero, 2, false}};
  setup.depth = 8;
  setup.read_bytes_per_s = 40e6;  // the requests beside the failing one take 1.6 ms each
  auto queue = make(setup);
  PinnedBlock block = pool_.lease(4 * kMiB);
  std::memset(block.data(), 1, 4 * kMiB);
  EXPECT_EQ(code_of([&] { queue->wait(queue->read(extent, block.data(), 4 * kMiB, "x")); }), Exit::kIo);
  std::memset(block.data(), 2, 4 * kMiB);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (std::byte b : block.bytes()) ASSERT_EQ(b, std::byte{2});
}

TEST_F(Queue, EndsWithWorkUnderWay) {
  const Extent extent = space_.allocate(8 * kMiB);
  PinnedBlock block = pool_.lease(8 * kMiB);
  SimSetup setup;
  setup.read_bytes_per_s = 1e6;  // 128 requests of 66 ms; only what is in the engine is waited for
  setup.depth = 2;
  auto queue = make(setup);
  const Ticket read = queue->read(extent, block.data(), 8 * kMiB, "x");
  queue->read(extent, block.data(), 4096, "y", {{read}});
  ASSERT_TRUE(test::until([&] { return disk_->operations() >= 2; }));
  queue.reset();
  EXPECT_LT(disk_->operations(), 64);
}

TEST_F(Queue, RefusesWhatCannotBeATransfer) {
  const Extent extent = space_.allocate(8192);
  PinnedBlock block = pool_.lease(16384);
  auto queue = make({});
  EXPECT_EQ(queue->read(extent, block.data(), 0, "nothing"), 0u);
  EXPECT_TRUE(queue->done(0));
  EXPECT_EQ(code_of([&] { queue->read(extent, block.data(), 512, "x"); }), Exit::kInternal);
  EXPECT_EQ(code_of([&] { queue->read(extent, block.data() + 512, 4096, "x"); }), Exit::kInternal);
  EXPECT_EQ(code_of([&] { queue->read(extent, block.data(), 12288, "x"); }), Exit::kInternal);
  EXPECT_EQ(code_of([&] { queue->read(extent, block.data(), 4096, "x", {{77}}); }), Exit::kInternal);
  EXPECT_EQ(code_of([&] { queue->wait(77); }), Exit::kInternal);
  EXPECT_EQ(code_of([&] { queue->wait(queue->read(extent, block.data(), 4096, "x")); }), Exit::kDone);
}

TEST_F(Queue, ThrowsWhatMakingItsEngineThrew) {
  const auto make_bad = [&]() -> std::unique_ptr<IoEngine> {
    throw Error(Exit::kIo, {.area = "IO-18", .what = "no engine", .place = "", .next = "", .kept = ""});
  };
  EXPECT_EQ(code_of([&] { IoQueue(space_, make_bad, kBlock); }), Exit::kIo);
}

TEST_F(Queue, CountsTheTimeInWhichSomethingIsUnderWayOnce) {
  constexpr double kRate = 20e6;
  SimSetup setup;
  setup.read_bytes_per_s = setup.write_bytes_per_s = kRate;
  const auto queue = make(setup);
  const Extent extent = space_.allocate(4 * kMiB), other = space_.allocate(4 * kMiB);
  const PinnedBlock from = pool_.lease(4 * kMiB), to = pool_.lease(4 * kMiB);
  EXPECT_EQ(queue->counters().busy_seconds, 0);
  // Both at once, at full speed each: the time counts once, so there is never more of it than has passed.
  const double start = monotonic_seconds();
  queue->write(extent, from.data(), 4 * kMiB, "one");
  queue->read(other, to.data(), 4 * kMiB, "two");
  queue->drain();
  const double passed = monotonic_seconds() - start, busy = queue->counters().busy_seconds;
  EXPECT_GE(busy, 0.9 * 4 * kMiB / kRate);
  EXPECT_LE(busy, passed);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(queue->counters().busy_seconds, busy);  // idle
}

TEST_F(Queue, TellsTheHookAboutEveryTransfer) {
  const Extent extent = space_.allocate(kMiB);
  PinnedBlock block = pool_.lease(kMiB);
  std::mutex mutex;
  std::vector<IoSpan> spans;
  auto queue = make({});
  queue->set_span_hook([&](const IoSpan& span) {
    const std::lock_guard lock(mutex);
    spans.push_back(span);
  });
  const Ticket written = queue->write(extent, block.data(), kMiB, "w");
  queue->read(extent, block.data(), 4096, "r", {{written}});
  queue->drain();
  const std::lock_guard lock(mutex);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].what, "w");
  EXPECT_EQ(spans[0].bytes, kMiB);
  EXPECT_EQ(spans[1].direction, IoDirection::kRead);
  EXPECT_GT(spans[0].start_ns, 0);
  EXPECT_GE(spans[1].start_ns, spans[0].end_ns);
}

TEST_F(Queue, ManyThreadsMayAskAndWait) {
  const Extent extents[] = {space_.allocate(kMiB), space_.allocate(kMiB), space_.allocate(kMiB)};
  auto queue = make({.faults = {}, .seed = 1, .shuffle = true, .depth = 8});
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      PinnedBlock out = pool_.lease(kMiB), in = pool_.lease(kMiB);
      for (uint64_t round = 0; round < 10; ++round) {
        fill(out.bytes(), 100 * t + round);
        const Ticket written = queue->write(extents[t], out.data(), kMiB, "w");
        queue->wait(queue->read(extents[t], in.data(), kMiB, "r", {{written}}));
        EXPECT_EQ(std::memcmp(out.data(), in.data(), kMiB), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(queue->counters().read_bytes, 30 * kMiB);
}

}  // namespace
}  // namespace lm
