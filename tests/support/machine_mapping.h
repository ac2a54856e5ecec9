// This process's mapping of memory that the ranks of its machine have in common (comm/machine_memory.h), as
// the kernel counts it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

namespace lm {

// In kB; -1: there is none. With several mappings the last one.
struct Mapping {
  int64_t resident = -1, share = -1;
  bool nameless = false;
  std::string permissions = {};  // "r--s"
};

inline Mapping own_mapping() {
  Mapping out;
  std::ifstream file("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(file, line);) {
    long value = 0;
    if (line.find("/memfd:lmlaunch-base") != std::string::npos) {
      here = true;
      out.nameless = line.ends_with("(deleted)");
      out.permissions = line.substr(line.find(' ') + 1, 4);
    } else if (std::sscanf(line.c_str(), "Rss: %ld kB", &value) == 1 && here) {
      out.resident = value;
    } else if (std::sscanf(line.c_str(), "Pss: %ld kB", &value) == 1 && here) {
      out.share = value;
    } else if (line.starts_with("VmFlags")) {
      here = false;
    }
  }
  return out;
}

}  // namespace lm
