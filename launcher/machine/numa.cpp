#include "launcher/machine/numa.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace lm {
namespace {

namespace fs = std::filesystem;

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// "0-15,32-47"; ignores what is no number.
cpu_set_t parse_core_list(const std::string& text) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream ends(range);
    int first = 0, last = 0;
    char dash = 0;
    if (!(ends >> first)) continue;
    if (!(ends >> dash >> last)) last = first;
    for (int core = first; core >= 0 && core <= last && core < CPU_SETSIZE; ++core) CPU_SET(core, &cores);
  }
  return cores;
}

// Prefers memory of the node, and uses that of others if it is full. (Without libnuma: it is one system call.
// If a container forbids it, memory comes from the node of the core that first touches it, which is this
// one.)
void prefer_memory_of(int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kBits + 1);
  mask.back() = 1UL << (static_cast<size_t>(node) % kBits);
  // The kernel uses one bit less than the given length.
  syscall(SYS_set_mempolicy, kPreferred, mask.data(), mask.size() * kBits + 1);
}

}  // namespace

std::optional<NumaNode> node_of_device(const std::string& pci_address, const std::string& root) {
  const std::string nodes = root + "/sys/devices/system/node/node";
  if (pci_address.empty() || !fs::exists(nodes + "1")) return std::nullopt;
  std::istringstream number(first_line(root + "/sys/bus/pci/devices/" + pci_address + "/numa_node"));
  NumaNode node;
  if (!(number >> node.number) || node.number < 0) return std::nullopt;
  node.core_list = first_line(fmt::format("{}{}/cpulist", nodes, node.number));
  node.cores = parse_core_list(node.core_list);
  if (CPU_COUNT(&node.cores) == 0) return std::nullopt;  // a node with memory only
  return node;
}

bool settle_on(const NumaNode& node) {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) return false;
  CPU_AND(&mine, &mine, &node.cores);
  if (CPU_COUNT(&mine) == 0 || sched_setaffinity(0, sizeof mine, &mine) != 0) return false;
  prefer_memory_of(node.number);
  return true;
}

}  // namespace lm
