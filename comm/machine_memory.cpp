#include "comm/machine_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kHugePage = 2 * kMiB;

// How another process of the machine finds a memfd, and knows it again.
struct Offer {
  int64_t process = 0, fd = -1;
  uint64_t device = 0, inode = 0;
};

bool is(const struct stat& info, const Offer& offer) {
  return info.st_dev == offer.device && info.st_ino == offer.inode;
}

Offer offer(int fd) {
  struct stat info {};
  if (fd < 0 || fstat(fd, &info) != 0) return {};
  return {getpid(), fd, info.st_dev, info.st_ino};
}

// -1 where it cannot be opened. In another namespace of processes that number is of another process: only the
// same file is opened, since opening some devices does something.
int open_offered(const Offer& offer) {
  if (offer.fd < 0) return -1;
  const std::string path = fmt::format("/proc/{}/fd/{}", offer.process, offer.fd);
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || !is(info, offer)) return -1;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd >= 0 && fstat(fd, &info) == 0 && is(info, offer)) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

// This process's resident shared memory, mapped files of tmpfs and memfds: the kernel counts it, where
// reading smaps would walk all pages. `otherwise` if it does not say.
int64_t resident_shared_bytes(int64_t otherwise) {
  std::FILE* const file = std::fopen("/proc/self/status", "re");
  if (file == nullptr) return otherwise;
  long kilobytes = -1;
  for (char line[256]; kilobytes < 0 && std::fgets(line, sizeof line, file) != nullptr;)
    if (std::sscanf(line, "RssShmem: %ld kB", &kilobytes) != 1) kilobytes = -1;
  std::fclose(file);
  return kilobytes < 0 ? otherwise : int64_t{1024} * kilobytes;
}

Error no_memory(int64_t bytes) {
  return Error(Exit::kHostMemory,
               {.area = "MEM-16",
                .what = fmt::format("cannot map {} of memory for the ranks of a machine: {}",
                                    format_bytes(bytes), std::strerror(errno)),
                .place = "",
                .next = "see `ulimit -v` and `ulimit -f`"});
}

}  // namespace

MachineMemory::MachineMemory(Group& group, int each) : group_(group), each_(each) {
  LM_CHECK(each >= 1 && group.ranks() % each == 0, "ranks of a machine");
  if (first()) fd_ = memfd_create("lmlaunch-base", MFD_CLOEXEC);
  const std::vector<Offer> all = group.gather("memory of machines", first() ? offer(fd_) : Offer());
  if (!first()) fd_ = open_offered(all[static_cast<size_t>(group.rank() - group.rank() % each)]);
  // Gathered after all have opened it: the first ranks keep theirs until then.
  const std::vector<char> open = group.gather("memory of machines", static_cast<char>(fd_ >= 0));
  works_ = std::ranges::all_of(open, [](char one) { return one != 0; });
}

MachineMemory::~MachineMemory() {
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

std::span<std::byte> MachineMemory::map(int64_t bytes) {
  LM_CHECK(works_ && memory_ == nullptr && bytes > 0, "memory of a machine is mapped once");
  together(group_, "memory of machines", [&] {
    if (first() && ftruncate(fd_, bytes) != 0) throw no_memory(bytes);
  });
  const auto size = static_cast<size_t>(bytes);
  void* const memory =
      mmap(nullptr, size, first() ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (memory == MAP_FAILED) throw no_memory(bytes);
  close(std::exchange(fd_, -1));
  if (bytes >= kHugePage) madvise(memory, size, MADV_HUGEPAGE);
  memory_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  return {memory_, size};
}

void MachineMemory::filled() {
  if (memory_ == nullptr) return;
  group_.barrier("the frozen weights of a machine");
  const auto size = static_cast<size_t>(bytes_);
  if (mprotect(memory_, size, PROT_READ) != 0) throw no_memory(bytes_);
#ifdef MADV_POPULATE_READ
  // Else pages are mapped as they are used: a kernel before 5.14 refuses, and nothing depends on it.
  madvise(memory_, size, MADV_POPULATE_READ);
#endif
}

int64_t MachineMemory::of_others() const {
  if (memory_ == nullptr) return 0;
  const int64_t here = std::min(bytes_, resident_shared_bytes(bytes_));
  return here - here / each_;
}

}  // namespace lm
