// Rates are measured once; what cannot be used is refused with its place.
#include "launcher/machine/disk_survey.h"

#include <gtest/gtest.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/json.h"
#include "config/config_names.h"
#include "offload/engines.h"
#include "offload/swap_space.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class DiskSurvey : public ::testing::Test {
 protected:
  DiskSurvey() {
    std::string name = (fs::current_path() / "disk-survey-XXXXXX").string();  // /tmp may be memory
    root_ = mkdtemp(name.data());
    for (const char* directory : {"/one", "/two"}) fs::create_directory(root_ + directory);
    config_.offload.paths = {root_ + "/one"};
    config_.offload.optimizer = OffloadTier::kNvme;
  }
  ~DiskSurvey() override { fs::remove_all(root_); }

  std::vector<Disk> survey(DiskRates rates) const { return survey_disks(config_, root_ + "/cache", rates); }
  std::string record() const { return fs::directory_iterator(root_ + "/cache/disks")->path().string(); }

  std::string root_;
  Config config_;
};

TEST_F(DiskSurvey, MeasuresADiskOnceAndDoubtsItsRecord) {
  EXPECT_EQ(survey(DiskRates::kCached)[0].read_bandwidth, 0);
  const Disk measured = survey(DiskRates::kMeasured)[0];
  EXPECT_GT(measured.read_bandwidth, 0);
  EXPECT_GT(measured.write_bandwidth, 0);
  EXPECT_GT(measured.both_bandwidth, 0);
  EXPECT_GT(measured.free_bytes, 0);
  EXPECT_TRUE(fs::is_empty(root_ + "/one"));
  EXPECT_EQ(survey(DiskRates::kMeasured)[0].read_bandwidth, measured.read_bandwidth);  // kept
  EXPECT_EQ(survey(DiskRates::kCached)[0].write_bandwidth, measured.write_bandwidth);
  EXPECT_EQ(survey(DiskRates::kCached)[0].both_bandwidth, measured.both_bandwidth);
  const Json kept = read_json_file(record());
  const auto rate_with = [&](const char* key, const Json& value) {
    Json json = kept;
    json[key] = value;
    std::ofstream(record()) << json.dump();
    return survey(DiskRates::kCached)[0].read_bandwidth;
  };
  const auto measured_at = kept["measured"].get<int64_t>();
  EXPECT_EQ(rate_with("measured", measured_at - 6 * 24 * 3600), measured.read_bandwidth);
  EXPECT_EQ(rate_with("measured", measured_at - 8 * 24 * 3600), 0);
  EXPECT_EQ(rate_with("measured", measured_at + 3600), 0);
  EXPECT_EQ(rate_with("device", "7:7"), 0);
  EXPECT_EQ(rate_with("read_bytes_per_s", -1), 0);
  EXPECT_EQ(rate_with("read_bytes_per_s", "fast"), 0);
  std::ofstream(record()) << "{";
  EXPECT_EQ(survey(DiskRates::kCached)[0].read_bandwidth, 0);
}

// The configuration's words are the ones that engines are chosen by.
TEST(EngineKinds, AreThoseOfTheConfiguration) {
  const std::pair<IoEngineChoice, IoEngineKind> same[] = {{IoEngineChoice::kAuto, IoEngineKind::kAuto},
                                                          {IoEngineChoice::kUring, IoEngineKind::kUring},
                                                          {IoEngineChoice::kThreads, IoEngineKind::kThreads}};
  EXPECT_EQ(std::size(same), std::size(EnumNames<IoEngineChoice>::kAll));
  for (const auto& [choice, kind] : same) EXPECT_EQ(engine_kind(name_of(choice)), kind);
  EXPECT_THROW(engine_kind("libaio"), Error);
}

TEST_F(DiskSurvey, PathsOnOneDiskShareItsSpace) {
  const int64_t alone = survey(DiskRates::kCached)[0].free_bytes;
  config_.offload.paths.push_back(root_ + "/two");
  const std::vector<Disk> both = survey(DiskRates::kCached);
  ASSERT_EQ(both.size(), 2u);
  EXPECT_LT(both[0].free_bytes, alone * 3 / 4);
  EXPECT_EQ(both[0].free_bytes, both[1].free_bytes);
}

TEST_F(DiskSurvey, RefusesWhatCannotBeUsedAndNamesIt) {
  const auto refusal = [&]() -> std::string {
    try {
      check_disks(config_, PlanPurpose::kEvaluate);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kDoesNotFit);
      return error.report();
    }
    return "";
  };
  EXPECT_EQ(refusal(), "");
  EXPECT_TRUE(fs::is_empty(root_ + "/one"));
  config_.offload.paths = {root_ + "/none"};
  EXPECT_NE(refusal().find(root_ + "/none"), std::string::npos);
  EXPECT_EQ(survey(DiskRates::kMeasured)[0].free_bytes, 0);
  std::ofstream(root_ + "/file") << "x";
  config_.offload.paths = {root_ + "/file"};
  EXPECT_NE(refusal().find("ENOTDIR"), std::string::npos);
  config_.offload.paths = {"/proc"};
  EXPECT_NE(refusal().find("/proc"), std::string::npos);
}

// A plan would count such a file as bytes of a disk, and the kernel as memory.
TEST_F(DiskSurvey, RefusesAPathWhoseFilesAreMemory) {
  struct statfs info {};
  if (statfs("/dev/shm", &info) != 0 || info.f_type != TMPFS_MAGIC) GTEST_SKIP() << "/dev/shm is no tmpfs";
  config_.offload.paths = {root_ + "/one", "/dev/shm"};
  try {
    check_disks(config_, PlanPurpose::kTrain);
    FAIL() << "a tmpfs is taken for a disk";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kDoesNotFit);
    EXPECT_EQ(error.text().place, "offload.paths: /dev/shm");
    EXPECT_NE(error.report().find("tmpfs"), std::string::npos) << error.report();
  }
}

// What a run may take of each path decides how long the file there is (job.cpp).
TEST_F(DiskSurvey, GivesWhatIsAboveAPathsLimitToTheOthers) {
  const SwapSpace space({{root_ + "/one", 3, 6 << 20}, {root_ + "/two", 1}}, 60 << 20);
  EXPECT_EQ(space.files()[0].bytes, 6 << 20);
  EXPECT_EQ(space.files()[1].bytes, 54 << 20);
  const SwapSpace open({{root_ + "/one", 3}, {root_ + "/two", 1}}, 60 << 20);
  EXPECT_EQ(open.files()[0].bytes, 45 << 20);
}

TEST_F(DiskSurvey, FillsEveryPathToItsLimitAndRefusesOneByteMore) {
  const std::vector<SwapPath> paths = {{root_ + "/one", 1, 2 << 20}, {root_ + "/two", 100, (1 << 20) + 100}};
  SwapSpace space(paths, 3 << 20);
  EXPECT_EQ(space.files()[0].bytes, 2 << 20);
  EXPECT_EQ(space.files()[1].bytes, 1 << 20);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(space.allocate(1 << 20).bytes, 1 << 20);
  try {
    SwapSpace(paths, (3 << 20) + 1);
    FAIL() << "one byte too many has a place";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kNoSpace);
    EXPECT_NE(error.text().what.find("2.00 MiB in " + root_ + "/one"), std::string::npos)
        << error.text().what;
    EXPECT_NE(error.text().next.find("offload.disk_limit"), std::string::npos) << error.text().next;
  }
}

}  // namespace
}  // namespace lm
