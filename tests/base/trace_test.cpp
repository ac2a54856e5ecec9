#include "base/trace.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <map>

#include "base/error.h"
#include "base/json.h"

namespace lm {
namespace {

class TraceFile : public ::testing::Test {
 protected:
  TraceFile() {
    std::string name = (std::filesystem::temp_directory_path() / "lmlaunch-trace-XXXXXX").string();
    directory_ = mkdtemp(name.data());
  }
  ~TraceFile() override { std::filesystem::remove_all(directory_); }
  std::string path() const { return directory_ + "/trace.json"; }

  std::string directory_;
};

TEST_F(TraceFile, HoldsTheSpansOfItsStepsAndNoOthers) {
  Trace trace(path(), 2, 3);
  EXPECT_FALSE(std::filesystem::exists(path()));
  for (int64_t step = 1; step <= 5; ++step) {
    trace.begin_step(step);
    EXPECT_EQ(trace.recording(), step == 2 || step == 3);
    trace.add(TraceRow::kCompute, "step " + std::to_string(step), step * 1000, step * 1000 + 500);
  }
  const Json json = read_json_file(path());
  std::vector<std::string> names;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "X") names.push_back(event["name"]);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"step 2", "step 3"}));
}

TEST_F(TraceFile, TransfersThatRunAtOnceDoNotOverlapInTheirRow) {
  Trace trace(path(), 1, 1);
  trace.begin_step(1);
  trace.add(TraceRow::kReads, "late", 2000, 9000, 8192);
  trace.add(TraceRow::kReads, "early", 1000, 5000, 4096);
  trace.add(TraceRow::kWrites, "other row", 0, 9500, 4096);
  trace.write();
  std::map<std::string, Json> events;
  const Json json = read_json_file(path());
  for (const Json& event : json["traceEvents"]) events[event["name"]] = event;
  EXPECT_EQ(events["early"]["ts"], 1.0);
  EXPECT_EQ(events["early"]["dur"], 4.0);
  EXPECT_EQ(events["late"]["ts"], 5.0);
  EXPECT_EQ(events["late"]["dur"], 4.0);
  EXPECT_EQ(events["late"]["args"]["under_way_us"], 7.0);
  EXPECT_EQ(events["other row"]["ts"], 0.0);
}

TEST_F(TraceFile, AnUnusablePathIsRefusedAtOnce) {
  EXPECT_THROW(Trace(directory_ + "/none/trace.json", 1, 2), Error);
}

}  // namespace
}  // namespace lm
