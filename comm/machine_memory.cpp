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
#include "base/host_address.h"

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

// Pages that were never touched are allocated, as zeros. Memory that has run out is an error here, and not a
// signal later.
void touch(std::span<std::byte> bytes) {
#ifdef MADV_POPULATE_READ
  int status = 0;
  do {
    status = madvise(bytes.data(), bytes.size(), MADV_POPULATE_READ);
  } while (status != 0 && errno == EINTR);
  if (status == 0) return;
  // EINVAL: a kernel before 5.14. What is short for a moment (EAGAIN) does not stop a page from being read.
  if (errno != EINVAL && errno != EAGAIN) throw no_memory(std::ssize(bytes));
#endif
  constexpr size_t kPage = 4096;
  for (size_t i = 0; i < bytes.size(); i += kPage)
    static_cast<void>(*static_cast<const volatile std::byte*>(bytes.data() + i));
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
  for (const Mapping& mapping : mappings_) {
    // First: the GPU's driver holds pages of the mapping.
    if (mapping.registered) cuda_unregister_host(mapping.memory);
    munmap(mapping.memory, static_cast<size_t>(mapping.bytes));
  }
  if (fd_ >= 0) close(fd_);
}

std::span<std::byte> MachineMemory::map(int64_t bytes, DeviceType device) {
  LM_CHECK(works_ && fd_ >= 0 && bytes > 0, "memory of a machine is mapped before it is filled");
  const int64_t offset = round_up(end_, kHugePage);
  together(group_, "memory of machines", [&] {
    if (first() && ftruncate(fd_, offset + bytes) != 0) throw no_memory(bytes);
  });
  end_ = offset + bytes;
  const auto size = static_cast<size_t>(bytes);
  void* const memory = mmap(nullptr, size, first() ? PROT_READ | PROT_WRITE : PROT_READ,
                            MAP_SHARED | MAP_NORESERVE, fd_, offset);
  if (memory == MAP_FAILED) throw no_memory(bytes);
  Mapping& mapping = mappings_.emplace_back(Mapping{static_cast<std::byte*>(memory), bytes});
  if (bytes >= kHugePage) madvise(memory, size, MADV_HUGEPAGE);
  if (device == DeviceType::kCuda) {
    touch_by_turns(mapping);
    register_with_gpu(mapping, offset);
  }
  return mapping.all();
}

// A page lies on the NUMA node of the rank that touches it first. All GPUs read the same block at about the
// same time: by turns, so that no node's memory and no link between nodes serves all of them.
void MachineMemory::touch_by_turns(const Mapping& mapping) {
  const int64_t place = group_.rank() % each_;
  for (int64_t begin = place * kHugePage; begin < mapping.bytes; begin += each_ * kHugePage)
    touch(mapping.all().subspan(static_cast<size_t>(begin),
                                static_cast<size_t>(std::min(kHugePage, mapping.bytes - begin))));
  group_.barrier("memory of machines");
  touch(mapping.all());
}

// Only the first rank's GPU writes. A driver that registers no read-only memory has to be able to write to
// it, at that moment.
void MachineMemory::register_with_gpu(Mapping& mapping, int64_t offset) {
  if (first()) {
    mapping.registered = cuda_register_host(mapping.memory, mapping.bytes, &refusal_);
    return;
  }
  std::string reason;
  mapping.registered =
      cuda_registers_read_only() && cuda_register_read_only(mapping.memory, mapping.bytes, &reason);
  if (mapping.registered) return;
  const int fd = open(fmt::format("/proc/self/fd/{}", fd_).c_str(), O_RDWR | O_CLOEXEC);
  const auto size = static_cast<size_t>(mapping.bytes);
  const bool mapped = fd >= 0 && mmap(mapping.memory, size, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, offset) != MAP_FAILED;
  if (fd >= 0) close(fd);
  if (!mapped) throw no_memory(mapping.bytes);
  mapping.registered = cuda_register_host(mapping.memory, mapping.bytes, &refusal_);
  if (mprotect(mapping.memory, size, PROT_READ) != 0) throw no_memory(mapping.bytes);
  touch(mapping.all());
}

void MachineMemory::filled() {
  if (mappings_.empty()) return;
  group_.barrier("the frozen weights of a machine");
  for (const Mapping& mapping : mappings_) {
    const auto size = static_cast<size_t>(mapping.bytes);
    if (mprotect(mapping.memory, size, PROT_READ) != 0) throw no_memory(mapping.bytes);
#ifdef MADV_POPULATE_READ
    // Else pages are mapped as they are used: a kernel before 5.14 refuses, and nothing depends on it.
    madvise(mapping.memory, size, MADV_POPULATE_READ);
#endif
  }
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

int64_t MachineMemory::of_others() const {
  int64_t mapped = 0;
  for (const Mapping& mapping : mappings_) mapped += mapping.bytes;
  if (mapped == 0) return 0;
  const int64_t here = std::min(mapped, resident_shared_bytes(mapped));
  return here - here / each_;
}

}  // namespace lm
