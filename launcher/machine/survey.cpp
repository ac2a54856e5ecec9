#include "launcher/machine/survey.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace lm {
namespace {

namespace fs = std::filesystem;

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream out;
  out << file.rdbuf();
  return out.str();
}

int64_t read_number(const std::string& text) {
  int64_t value = 0;
  const size_t first = text.find_first_of("0123456789");
  if (first == std::string::npos) return 0;
  const auto result = std::from_chars(text.data() + first, text.data() + text.size(), value);
  return result.ec == std::errc() ? value : 0;
}

// The value after `name` at the beginning of a line of `text`; "": none.
std::string field(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    const size_t first = line.find_first_not_of(" \t:", name.size());
    return first == std::string::npos ? "" : line.substr(first);
  }
  return "";
}

bool has_word(const std::string& words, const std::string& word, char separator) {
  std::istringstream rest(words);
  for (std::string one; std::getline(rest, one, separator);) {
    if (one == word) return true;
  }
  return false;
}

struct MemoryGroup {
  std::string mount, path;  // "/sys/fs/cgroup", "/user.slice/x"
  bool v2 = false;
};

// The cgroup of this process with a memory controller: v1 if the line names it, else the unified hierarchy.
MemoryGroup memory_group(const std::string& root) {
  MemoryGroup out{root + "/sys/fs/cgroup", "/", true};
  std::istringstream lines(read_text(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (has_word(controllers, "memory", ',')) {
      return {root + "/sys/fs/cgroup/memory", line.substr(second + 1), false};
    }
    if (controllers.empty()) out.path = line.substr(second + 1);
  }
  return out;
}

// Searches from the cgroup up to the mount's top: a container often sees a path that its mount does not have.
std::vector<std::string> up_from(const MemoryGroup& group) {
  std::vector<std::string> out;
  for (fs::path path(group.path);; path = path.parent_path()) {
    out.push_back(group.mount + (path == "/" ? "" : path.string()));
    if (path == "/" || path.empty()) return out;
  }
}

int usable_cores(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  // cgroup v2 quota "max 100000" or "200000 100000"; v1 has two files.
  const std::string v2 = read_text(root + "/sys/fs/cgroup/cpu.max");
  int64_t quota = v2.starts_with("max") ? 0 : read_number(v2), period = 100000;
  if (v2.find(' ') != std::string::npos) period = read_number(v2.substr(v2.find(' ')));
  if (v2.empty()) {
    const std::string v1 = read_text(root + "/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    quota = v1.starts_with("-") ? 0 : read_number(v1);
    period = std::max<int64_t>(read_number(read_text(root + "/sys/fs/cgroup/cpu/cpu.cfs_period_us")), 1);
  }
  if (quota > 0 && period > 0) cores = std::min<int>(cores, static_cast<int>((quota + period - 1) / period));
  return std::max(cores, 1);
}

}  // namespace

MemoryLimit read_memory_limit(const std::string& root) {
  MemoryLimit best;
  const auto consider = [&](int64_t bytes, const std::string& source) {
    // v1's "no limit" is 2^63 rounded down to a page.
    if (bytes <= 0 || bytes >= (int64_t{1} << 60)) return;
    if (best.bytes == 0 || bytes < best.bytes) best = {bytes, source};
  };
  const MemoryGroup group = memory_group(root);
  for (const std::string& directory : up_from(group)) {
    const std::string file = directory + (group.v2 ? "/memory.max" : "/memory.limit_in_bytes");
    const std::string text = read_text(file);
    if (!text.starts_with("max")) consider(read_number(text), file.substr(root.size()));
  }
  rlimit as{};
  if (getrlimit(RLIMIT_AS, &as) == 0 && as.rlim_cur != RLIM_INFINITY) {
    consider(static_cast<int64_t>(std::min<rlim_t>(as.rlim_cur, INT64_MAX)), "RLIMIT_AS");
  }
  return best;
}

int64_t read_oom_kills(const std::string& root) {
  const MemoryGroup group = memory_group(root);
  for (const std::string& directory : up_from(group)) {
    const std::string text = read_text(directory + (group.v2 ? "/memory.events" : "/memory.oom_control"));
    if (!text.empty()) return read_number(field(text, "oom_kill "));
  }
  // Without a cgroup that counts kills: the machine's count.
  return read_number(field(read_text(root + "/proc/vmstat"), "oom_kill "));
}

HostFacts survey_host(const std::string& root) {
  HostFacts out;
  const std::string cpuinfo = read_text(root + "/proc/cpuinfo"), meminfo = read_text(root + "/proc/meminfo");
  out.cpu.model = field(cpuinfo, "model name");
  out.cpu.cores = usable_cores(root);
  out.memory = read_number(field(meminfo, "MemTotal")) * 1024;
  out.available_memory = read_number(field(meminfo, "MemAvailable")) * 1024;
  out.limit = read_memory_limit(root);
  return out;
}

int count_gpus(const std::string& root) {
  int count = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root + "/dev", error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("nvidia") || name.size() == 6) continue;
    count += std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return std::isdigit(c); });
  }
  return count;
}

std::string gpu_driver(const std::string& root) {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Fri Jan ..."
  std::istringstream words(field(read_text(root + "/proc/driver/nvidia/version"), "NVRM version"));
  for (std::string word; words >> word;) {
    if (std::isdigit(static_cast<unsigned char>(word[0])) && word.find('.') != std::string::npos) return word;
  }
  return "";
}

}  // namespace lm
