// A disk that gives no answer any more: whoever waits is told within the time that it was given, by name, and
// nothing that ends afterwards waits for it. The queue counts that time in slices that were waited out, and
// says the sum; a wait for half of it is worth a warning, so each further wait would be one warning more.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "support.h"
#include "tests/support/sim_disk.h"

namespace lm {
namespace {

using namespace offload_tests;

constexpr int64_t kBlock = 64 * kKiB;
constexpr std::chrono::seconds kSilence{1};

class Hang : public ::testing::Test {
 protected:
  // What the queue's thread, memory and files need stays where requests hang in it: for the process's life.
  struct Bench {
    TemporaryDirectory first, second;
    SwapSpace space{{{first.path()}, {second.path()}}, 8 * kMiB};
    PinnedPool pool{DeviceType::kCpu, 8 * kMiB};
    std::unique_ptr<SimDisk> disk;
    std::unique_ptr<IoQueue> queue;
    Extent extent = space.allocate(2 * kMiB);  // on both paths
    PinnedBlock block = pool.lease(2 * kMiB);
  };

  ~Hang() override {
    if (bench_ != nullptr && bench_->queue == nullptr) [[maybe_unused]]
      const Bench* const stays = bench_.release();
  }

  IoQueue& start(SimSetup setup) {
    bench_ = std::make_unique<Bench>();
    bench_->disk = std::make_unique<SimDisk>(bench_->space.files(), std::move(setup));
    bench_->queue = std::make_unique<IoQueue>(
        bench_->space, [this] { return bench_->disk->make_engine(); }, kBlock, IoRetry{.silence = kSilence});
    return *bench_->queue;
  }
  Ticket write(const std::string& what) {
    return bench_->queue->write(bench_->extent, bench_->block.data(), bench_->extent.bytes, what);
  }
  // The error, and how often a wait was long enough for a warning.
  static std::optional<Error> error_of(const std::function<void()>& work, int* waits) {
    std::optional<Error> out;
    ::testing::internal::CaptureStderr();
    try {
      work();
    } catch (const Error& error) {
      out = error;
    }
    const std::string said = ::testing::internal::GetCapturedStderr();
    *waits = 0;
    for (size_t at = said.find("SLOW-29"); at != std::string::npos; at = said.find("SLOW-29", at + 1))
      ++*waits;
    return out;
  }
  // And the queue ends without another wait, though its thread does not.
  void expect_end_without_a_wait() {
    int waits = 0;
    EXPECT_FALSE(error_of([&] { bench_->queue.reset(); }, &waits));
    EXPECT_EQ(waits, 0);
  }

  std::unique_ptr<Bench> bench_;
};

TEST_F(Hang, IsAnErrorInTimeThatNamesThePathAndTheState) {
  for (int file = 0; file < 2; ++file) {
    // Operations alternate between the two files: one of them is dead from its third request on.
    std::vector<SimFaultAt> faults;
    for (int64_t k = 4 + file; k < 64; k += 2) faults.push_back({SimFault::kHang, k, false});
    IoQueue& queue = start({.faults = faults, .depth = 64});
    int waits = 0;
    const Ticket ticket = write("optimizer state of block 1, tile 2");
    const std::optional<Error> error = error_of([&] { queue.wait(ticket); }, &waits);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), Exit::kIo);
    EXPECT_EQ(error->text().area, "IO-05");
    EXPECT_NE(error->text().what.find("the disk has not answered for 1 s; waiting for the write of optimizer "
                                      "state of block 1, tile 2"),
              std::string::npos)
        << error->report();
    const std::string& path = (file == 0 ? bench_->first : bench_->second).path();
    EXPECT_TRUE(error->text().place.starts_with(path + "+")) << error->report();
    EXPECT_EQ(waits, 1);
    EXPECT_TRUE(queue.hangs());
    // Every later call is told the same, without another wait.
    EXPECT_TRUE(error_of([&] { queue.drain(); }, &waits));
    EXPECT_EQ(waits, 0);
    expect_end_without_a_wait();
    [[maybe_unused]] const Bench* const stays = bench_.release();
  }
}

TEST_F(Hang, ASlowDiskIsWaitedFor) {
  SimSetup setup;
  setup.write_bytes_per_s = 0.9e6;  // a request takes 73 ms, all of them 2.3 s: over twice the silence
  setup.depth = 1;
  IoQueue& queue = start(setup);
  queue.wait(write("slow"));
  EXPECT_FALSE(queue.hangs());
}

TEST_F(Hang, DoesNotHoldUpTheQueuesEnd) {
  start({.faults = {{SimFault::kHang, 3, true}}, .depth = 8});
  write("never");
  while (bench_->disk->operations() < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  int waits = 0;
  EXPECT_FALSE(error_of([&] { bench_->queue.reset(); }, &waits));
  EXPECT_EQ(waits, 1);
}

// One request fails, and those beside it never end: the failure is the cause.
TEST_F(Hang, BesideAFailureIsNotTheCause) {
  IoQueue& queue = start({.faults = {{SimFault::kEnospc, 2, false}, {SimFault::kHang, 3, true}}, .depth = 8});
  int waits = 0;
  const Ticket ticket = write("full");
  const std::optional<Error> error = error_of([&] { queue.wait(ticket); }, &waits);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), Exit::kNoSpace) << error->report();
  EXPECT_EQ(waits, 1);
  EXPECT_TRUE(queue.hangs());
  expect_end_without_a_wait();
}

}  // namespace
}  // namespace lm
