#include "launcher/machine/survey.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace lm {
namespace {

namespace fs = std::filesystem;

// A /proc and /sys of a machine that is not this one.
class SurveyOf : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "lmlaunch-survey-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string root_;
};

TEST_F(SurveyOf, ACgroupV2LimitIsTheSmallestOnTheWayUp) {
  write("/proc/self/cgroup", "0::/user.slice/job/step\n");
  write("/sys/fs/cgroup/user.slice/job/step/memory.max", "max\n");
  write("/sys/fs/cgroup/user.slice/job/memory.max", "8589934592\n");
  write("/sys/fs/cgroup/user.slice/memory.max", "17179869184\n");
  EXPECT_EQ(read_memory_limit(root_).bytes, 8589934592);
  EXPECT_EQ(read_memory_limit(root_).source, "/sys/fs/cgroup/user.slice/job/memory.max");
  write("/sys/fs/cgroup/user.slice/job/step/memory.events", "low 0\noom 3\noom_kill 2\n");
  EXPECT_EQ(read_oom_kills(root_), 2);
}

TEST_F(SurveyOf, ACgroupV1LimitIsFoundEvenWhenThePathIsTheHosts) {
  write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "67108864\n");
  write("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
  EXPECT_EQ(read_memory_limit(root_).bytes, 67108864);
  EXPECT_EQ(read_oom_kills(root_), 5);
}

TEST_F(SurveyOf, NoLimitIsNone) {
  write("/proc/self/cgroup", "4:memory:/\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(read_memory_limit(root_).bytes, 0);
  fs::remove_all(root_ + "/proc");
  EXPECT_EQ(read_memory_limit(root_).bytes, 0);
  EXPECT_EQ(read_oom_kills(root_), 0);
  write("/proc/vmstat", "pgfault 17\noom_kill 4\n");
  EXPECT_EQ(read_oom_kills(root_), 4);
}

TEST_F(SurveyOf, ReadsProcessorAndMemory) {
  write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2\n");
  write("/proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n");
  write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  const HostFacts host = survey_host(root_);
  EXPECT_EQ(host.cpu.model, "Some CPU @ 2 GHz");
  EXPECT_EQ(host.cpu.cores, 1);  // one CPU's worth of time
  EXPECT_EQ(host.memory, 16384 * 1024);
  EXPECT_EQ(host.available_memory, 8192 * 1024);
}

TEST_F(SurveyOf, CountsGpusByTheirDevices) {
  EXPECT_EQ(count_gpus(root_), 0);
  for (const char* name : {"nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia", "nvme0"})
    write(std::string("/dev/") + name, "");
  EXPECT_EQ(count_gpus(root_), 3);
  write("/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n");
  EXPECT_EQ(gpu_driver(root_), "580.65.06");
}

TEST_F(SurveyOf, DescribesGpusByProcInPciOrderWhereNvmlDoesNot) {
  EXPECT_TRUE(survey_gpus(root_).cards.empty());
  write("/dev/nvidia0", "");
  write("/dev/nvidia1", "");
  GpuSurvey survey = survey_gpus(root_);
  ASSERT_EQ(survey.cards.size(), 2u);
  EXPECT_EQ(survey.cards[0].name + survey.cards[0].uuid, "");
  EXPECT_FALSE(survey.problem.empty());
  const std::string card = "/proc/driver/nvidia/gpus/0000:";
  write(card + "8a:00.0/information",
        "Model: \t NVIDIA H100\nGPU UUID: \t GPU-?"
        "???\n");
  write(card + "1b:00.0/information", "Model: \t NVIDIA L4\nIRQ: 7\nGPU UUID: \t GPU-5c-1\n");
  survey = survey_gpus(root_);
  ASSERT_EQ(survey.cards.size(), 2u);
  EXPECT_EQ(survey.cards[0].name, "NVIDIA L4");
  EXPECT_EQ(survey.cards[0].uuid, "GPU-5c-1");
  EXPECT_EQ(survey.cards[0].pci_address, "0000:1b:00.0");
  EXPECT_EQ(survey.cards[1].name, "NVIDIA H100");
  EXPECT_EQ(survey.cards[1].uuid, "");
  EXPECT_EQ(survey.cards[1].memory, 0);
  // In a container that has one of them, which one?
  fs::remove(root_ + "/dev/nvidia0");
  survey = survey_gpus(root_);
  ASSERT_EQ(survey.cards.size(), 1u);
  EXPECT_EQ(survey.cards[0].name, "");
}

TEST(Survey, ThisMachineHasMemoryAndCores) {
  const HostFacts host = survey_host();
  EXPECT_GE(host.cpu.cores, 1);
  EXPECT_GT(host.memory, host.available_memory);
  EXPECT_GT(host.available_memory, 0);
  EXPECT_FALSE(host.cpu.model.empty());
}

}  // namespace
}  // namespace lm
