// NUMA nodes: memory and cores of a GPU's own node are nearer to it than the others'. Any thread may call.
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

// The node of a PCI device ("0000:17:00.0"); empty if the machine has only one node, or the kernel does not
// tell. `root` is a directory to read instead of / (tests).
std::optional<NumaNode> node_of_device(const std::string& pci_address, const std::string& root = "");

// Binds this thread, and those that it starts, to the node's cores, as far as they may use them, and to its
// memory while there is any. False, without a change, if they may use none of its cores.
bool settle_on(const NumaNode& node);

}  // namespace lm
