// A rank runs beside its GPU: what the kernel says of nodes, and where threads then run.
#include "launcher/machine/numa.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr char kGpu[] = "0000:17:00.0";

class Numa : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/lm_numa_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void write_node(int node, const std::string& cores) {
    write("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist", cores + "\n");
  }
  void write_gpu(const std::string& node) {
    write(std::string("/sys/bus/pci/devices/") + kGpu + "/numa_node", node + "\n");
  }
  std::string root_;
};

cpu_set_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  EXPECT_EQ(sched_getaffinity(0, sizeof cores, &cores), 0);
  return cores;
}

TEST_F(Numa, TheKernelNamesTheNodeOfAGpuAndItsCores) {
  write_node(0, "0-3,8");
  write_node(1, "4-7,9-10");
  write_gpu("1");
  const std::optional<NumaNode> node = node_of_device(kGpu, root_);
  ASSERT_TRUE(node);
  EXPECT_EQ(node->number, 1);
  EXPECT_EQ(node->core_list, "4-7,9-10");
  EXPECT_EQ(CPU_COUNT(&node->cores), 6);
  for (const int core : {4, 5, 6, 7, 9, 10}) EXPECT_TRUE(CPU_ISSET(core, &node->cores)) << core;
}

TEST_F(Numa, WhatIsNotKnownHasNoNode) {
  write_gpu("0");
  EXPECT_FALSE(node_of_device(kGpu, root_)) << "no node is listed";
  write_node(0, "0-3");
  EXPECT_FALSE(node_of_device(kGpu, root_)) << "one node has everything";
  write_node(1, "");
  EXPECT_TRUE(node_of_device(kGpu, root_));
  EXPECT_FALSE(node_of_device("0000:18:00.0", root_)) << "another device";
  EXPECT_FALSE(node_of_device("", root_)) << "NVML did not give the address";
  write_gpu("1");
  EXPECT_FALSE(node_of_device(kGpu, root_)) << "a node without cores";
  for (const char* nothing : {"-1", "", "x"}) {
    write_gpu(nothing);
    EXPECT_FALSE(node_of_device(kGpu, root_)) << nothing;
  }
}

// In a thread of its own: where a thread may run is its own affair.
TEST_F(Numa, ThreadsThatAreStartedLaterRunOnItsCoresThatAreOurs) {
  std::thread([] {
    NumaNode node{.number = 0, .cores = usable_cores(), .core_list = ""};
    int core = 0;
    while (!CPU_ISSET(core, &node.cores)) ++core;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);  // the node's others are not ours
    CPU_SET(CPU_SETSIZE - 1, &node.cores);
    ASSERT_TRUE(settle_on(node));
    std::thread([&] {
      const cpu_set_t now = usable_cores();
      EXPECT_EQ(CPU_COUNT(&now), 1);
      EXPECT_TRUE(CPU_ISSET(core, &now));
      int policy = -1;
      unsigned long nodes[16] = {};
      if (syscall(SYS_get_mempolicy, &policy, nodes, sizeof nodes * 8, nullptr, 0) != 0) return;  // forbidden
      EXPECT_EQ(policy, 1) << "preferred";
      EXPECT_EQ(nodes[0], 1UL) << "node 0";
    }).join();
  }).join();
}

TEST_F(Numa, WhoMayUseNoCoreOfTheNodeStays) {
  std::thread([] {
    const cpu_set_t before = usable_cores();
    NumaNode node;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &before)) CPU_SET(core, &node.cores);
    }
    EXPECT_FALSE(settle_on(node));
    const cpu_set_t now = usable_cores();
    EXPECT_TRUE(CPU_EQUAL(&before, &now));
  }).join();
}

}  // namespace
}  // namespace lm
