// A compute thread that is stuck, and others that only seem so. Deadlines are fractions of a second; what
// must not be given up is watched for several of them.
#include "train/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>

namespace lm {
namespace {

using std::chrono::milliseconds;

constexpr double kShort = 0.4;

// One that can be told to wait for others.
class WaitingGroup final : public Group {
 public:
  int rank() const override { return 2; }
  int ranks() const override { return 3; }
  void all_gather_among(const Members&, const char*, std::byte*, std::span<const ByteRange>,
                        int64_t) override {}
  void reduce_scatter_among(const Members&, const char*, const std::byte*, std::span<const ByteRange>,
                            int64_t, const Add&) override {}
  bool waits() const override { return others_are_late; }
  std::optional<DeviceStand> device() const override {
    return DeviceStand{.passed = passed, .inside = inside, .where = "is somewhere"};
  }
  std::atomic<bool> others_are_late = false, inside = false;
  std::atomic<uint64_t> passed = 0;
};

struct Watched {
  ProgressCounter progress_counter;
  WaitingGroup group, gpus;
  std::atomic<int64_t> bytes = 0;
  std::promise<std::string> given_up;
  std::future<std::string> message = given_up.get_future();
  std::optional<Watchdog> dog;

  explicit Watched(double step_seconds = 0, bool on_gpu = false) {
    dog.emplace(WatchdogSetup{.progress_counter = progress_counter,
                              .group = group,
                              .gpus = on_gpu ? &gpus : nullptr,
                              .least = kShort,
                              .step_seconds = step_seconds,
                              .host = "node7",
                              .name = [](const Operation& op) { return operation_name(op.kind); },
                              .moved_bytes = [this] { return bytes.load(); },
                              .give_up =
                                  [this](const Error& error) {
                                    given_up.set_value(std::to_string(static_cast<int>(error.code())) + " " +
                                                       error.what());
                                  }});
  }
  bool spared() { return message.wait_for(milliseconds(0)) == std::future_status::timeout; }
};

const Operation kForwardOp{.kind = OperationKind::kForward, .unit = 3};

TEST(Watchdog, NamesRankHostAndOperationOfAStuckThread) {
  Watched rank;
  rank.progress_counter.begin_step(7);
  rank.progress_counter.begin(kForwardOp);
  ASSERT_EQ(rank.message.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  const std::string message = rank.message.get();
  EXPECT_EQ(message.rfind("41 rank 2 on node7 has made no progress for ", 0), 0U) << message;
  EXPECT_NE(message.find("it is stuck in \"forward\" of step 7"), std::string::npos) << message;
  EXPECT_EQ(message.find("GPU is"), std::string::npos) << message;
}

TEST(Watchdog, SaysWhereTheGpuOfAStuckRankIs) {
  Watched rank(0, true);
  rank.progress_counter.begin(kForwardOp);
  ASSERT_EQ(rank.message.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_NE(rank.message.get().find(" s allowed; its GPU is somewhere"), std::string::npos);
}

// Its GPU waits for others, or goes on with what it was given, each for several times the limit.
TEST(Watchdog, SparesARankWhoseGpuWaitsOrGoesOn) {
  Watched waits(0, true), goes_on(0, true);
  waits.gpus.others_are_late = waits.gpus.inside = true;
  for (Watched* const rank : {&waits, &goes_on}) rank->progress_counter.begin(kForwardOp);
  for (int i = 0; i < 300; ++i) {
    ++goes_on.gpus.passed;
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(waits.spared());
  EXPECT_TRUE(goes_on.spared());
}

// A rank that is stopped in the call is found by its silence first.
TEST(Watchdog, GivesACallOfAllRanksHalfAsMuchTimeAgain) {
  Watched rank(0, true);
  rank.gpus.inside = true;
  rank.progress_counter.begin(kForwardOp);
  ASSERT_EQ(rank.message.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_NE(rank.message.get().find("no progress for 0.6 s"), std::string::npos);
}

// Each of them for several times the limit: one operation after the other, a wait for others, a slow disk, a
// load before the first step, and a save.
TEST(Watchdog, SparesWhoMakesHeadwayOrNeedNot) {
  Watched goes_on, waits, moves, loads, saves;
  waits.group.others_are_late = true;
  loads.progress_counter.begin_step(1);
  for (Watched* const rank : {&goes_on, &waits, &moves, &saves}) rank->progress_counter.begin(kForwardOp);
  saves.progress_counter.end_list();
  for (int i = 0; i < 300; ++i) {
    goes_on.progress_counter.begin(kForwardOp);
    ++moves.bytes;
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(goes_on.spared());
  EXPECT_TRUE(waits.spared());
  EXPECT_TRUE(moves.spared());
  EXPECT_TRUE(loads.spared());
  EXPECT_TRUE(saves.spared());
}

TEST(Watchdog, AllowsTenStepsAsPlannedThenAsMeasured) {
  Watched rank(60);
  EXPECT_DOUBLE_EQ(rank.dog->limit(), 600);
  for (const double seconds : {40.0, 3.0, 2.0, 2.5, 90.0}) rank.dog->step_done(seconds);
  EXPECT_DOUBLE_EQ(rank.dog->limit(), 30);  // the median's
  for (int i = 0; i < 6; ++i) rank.dog->step_done(0.001);
  EXPECT_DOUBLE_EQ(rank.dog->limit(), kShort);
}

TEST(DiskBytes, AreCountedByTheKernel) {
  EXPECT_GE(disk_bytes_moved(), 0);
}

}  // namespace
}  // namespace lm
