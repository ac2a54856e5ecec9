// On a machine of several NUMA nodes, memory and cores of one node are nearer to a GPU than the others'. Any
// thread may call.
#pragma once

#include <sched.h>

#include <optional>
#include <string>

namespace lm {

struct NumaNode {
  int number = 0;
  cpu_set_t cores{};
  std::string core_list;  // as the kernel writes it: "0-15,32-47"
};

// The node of a PCI device ("0000:17:00.0"); none where the machine has one node alone, or where the kernel
// does not say. `root` is a directory to read instead of / (tests).
std::optional<NumaNode> node_of_device(const std::string& pci_address, const std::string& root = "");

// From now on this thread, and those that it starts, run on the node's cores, of those that they may use, and
// get the node's memory while there is any. False, and nothing is changed, where they may use none of its
// cores.
bool settle_on(const NumaNode& node);

}  // namespace lm
