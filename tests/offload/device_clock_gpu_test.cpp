// A GPU's time as its own events tell it. Skips without one.
#include "base/device_clock.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <set>
#include <utility>

#include "base/arena.h"
#include "base/bytes.h"
#include "base/json.h"
#include "offload/pinned.h"
#include "tests/support/on_emulator.h"

namespace lm {
namespace {

class Clock : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }

  // A copy that compute needs; `first`: all of it is over before compute asks.
  struct Parts {
    Stream compute{DeviceType::kCuda}, up{DeviceType::kCuda};
    PinnedPool pool{DeviceType::kCuda, 256 * kMiB};
    PinnedBlock host = pool.lease(256 * kMiB);
    Memory on_device{DeviceType::kCuda, 256 * kMiB};
    Event arrived{DeviceType::kCuda};
  };
  static void move(Parts& p, DeviceClock& clock, bool first) {
    const int64_t copy =
        clock.begin(DeviceClock::Kind::kToDevice, p.up.view(), p.host.size(), [] { return "weights"; });
    copy_bytes(p.on_device.data(), p.host.data(), p.host.size(), p.up.view());
    clock.end(copy, p.up.view());
    p.arrived.record(p.up.view());
    if (first) p.up.synchronize();
    const int64_t stall = clock.begin(DeviceClock::Kind::kStall, p.compute.view(), 0, [] { return "wait"; });
    p.arrived.wait(p.compute.view());
    clock.end(stall, p.compute.view());
    const int64_t work = clock.begin(DeviceClock::Kind::kCompute, p.compute.view(), 0, [] { return "work"; });
    zero_bytes(p.on_device.data(), p.on_device.size(), p.compute.view());
    clock.end(work, p.compute.view());
    p.compute.synchronize();
  }
};

TEST_F(Clock, TellsAWaitForATransferFromATransferThatNobodyWaitedFor) {
  Parts p;
  DeviceClock clock(p.compute.view(), nullptr);
  // {copying, waiting} of one more move. The emulator's streams are threads: where cores are busy one may
  // come so late that nothing is left to wait for, so the clearest of some moves counts.
  const auto moved = [&](bool first) {
    const double copied = clock.copy_seconds(), stalled = clock.stall_seconds();
    move(p, clock, first);
    clock.collect();
    return std::pair(clock.copy_seconds() - copied, clock.stall_seconds() - stalled);
  };
  const int moves = on_emulator() ? 8 : 1;
  bool hidden = false, waited_for = false;
  for (int i = 0; i < moves && !hidden; ++i) {
    const auto [copied, stalled] = moved(true);
    EXPECT_GT(copied, 0);
    hidden = stalled < copied / 2;
  }
  for (int i = 0; i < moves && !waited_for; ++i) {
    const auto [copied, stalled] = moved(false);
    EXPECT_GT(copied, 0);
    waited_for = stalled > copied / 2;
  }
  EXPECT_TRUE(hidden && waited_for) << hidden << waited_for;
}

TEST_F(Clock, PutsItsSpansIntoRowsOfTheirOwnInHostTime) {
  // us: how late the host may notice that the GPU has reached a point, on busy cores. Another clock would be
  // off by hours.
  const double slack = on_emulator() ? 500e3 : 1e3;
  std::string name = (std::filesystem::temp_directory_path() / "lmlaunch-clock-XXXXXX").string();
  const std::string directory = mkdtemp(name.data()), path = directory + "/trace.json";
  Parts p;
  Trace trace(path, 1, 1);
  DeviceClock clock(p.compute.view(), &trace);
  trace.begin_step(1);
  const int64_t start = steady_ns();
  move(p, clock, false);
  clock.collect();
  const double span_us = static_cast<double>(steady_ns() - start) / 1e3;
  trace.add(TraceRow::kCompute, "host", start, start + 1000);
  trace.write();
  std::set<std::string> rows, names;
  const Json json = read_json_file(path);
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "M") rows.insert(event["args"]["name"]);
    if (event["ph"] != "X") continue;
    names.insert(event["name"]);
    EXPECT_GE(event["ts"].get<double>(), -slack) << event;
    EXPECT_LE(event["ts"].get<double>() + event["dur"].get<double>(), span_us + slack) << event;
  }
  EXPECT_TRUE(rows.contains("GPU compute") && rows.contains("to GPU") && rows.contains("from GPU"));
  EXPECT_EQ(names, (std::set<std::string>{"host", "weights", "wait", "work"}));
  std::filesystem::remove_all(directory);
}

TEST_F(Clock, KeepsWhatIsNotOverForTheNextTime) {
  Parts p;
  DeviceClock clock(p.compute.view(), nullptr);
  const int64_t open = clock.begin(DeviceClock::Kind::kFromDevice, p.up.view(), 0, [] { return ""; });
  clock.collect();
  EXPECT_EQ(clock.copy_seconds(), 0);
  copy_bytes(p.host.data(), p.on_device.data(), p.host.size(), p.up.view());
  clock.end(open, p.up.view());
  p.up.synchronize();
  clock.collect();
  EXPECT_GT(clock.copy_seconds(), 0);
}

}  // namespace
}  // namespace lm
