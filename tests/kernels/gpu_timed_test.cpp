// Timed kernels do what theirs do, and while a trace is recorded each call is a span of the GPU's.
#include <unistd.h>

#include <filesystem>

#include "base/arena.h"
#include "base/json.h"
#include "base/trace.h"
#include "kernels/timed.h"
#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

constexpr int64_t kElements = 1000;

// Adds 1 to what is 1 so often.
void add_ones(const Kernels& kernels, StreamView stream, const Memory& sum, const Memory& one, int times) {
  for (int i = 0; i < times; ++i)
    kernels.accumulate({.to = sum.data(), .from = one.data(), .elements = kElements}, stream);
}

TEST_F(GpuKernels, TimedCallsAreSpansOfATrace) {
  std::string name = (std::filesystem::temp_directory_path() / "lmlaunch-timed-XXXXXX").string();
  const std::string directory = mkdtemp(name.data()), path = directory + "/trace.json";
  const Stream stream(DeviceType::kCuda);
  const StreamView view = stream.view();
  const Memory sum(DeviceType::kCuda, kElements * 4), one(DeviceType::kCuda, kElements * 4);
  std::vector<float> host(kElements, 1);
  copy_bytes(sum.data(), host.data(), sum.size(), view);
  copy_bytes(one.data(), host.data(), one.size(), view);
  Trace trace(path, 2, 2);
  DeviceClock clock(view, &trace);
  {
    const TimedKernels timed(kernels(DeviceType::kCuda), clock);
    trace.begin_step(1);
    add_ones(timed.table(), view, sum, one, 1);  // not recorded
    trace.begin_step(2);
    add_ones(timed.table(), view, sum, one, 3);
  }
  stream.synchronize();
  clock.collect();
  trace.write();
  copy_bytes(host.data(), sum.data(), sum.size(), view);
  stream.synchronize();
  EXPECT_EQ(host, std::vector<float>(kElements, 5));
  int additions = 0;
  std::string row;
  const Json json = read_json_file(path);
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "M" && event["args"]["name"] == "GPU kernels") row = event["tid"].dump();
    if (event["ph"] != "X" || event["name"] != "accumulate") continue;
    ++additions;
    EXPECT_EQ(event["tid"].dump(), row);
    EXPECT_GE(event["dur"].get<double>(), 0);
  }
  EXPECT_EQ(additions, 3);
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace lm
