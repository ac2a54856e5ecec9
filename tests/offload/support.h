// What the offload tests share: a directory that goes away, memory that direct transfers take, chunks with
// checksums, and a small workload that notices every wrong byte.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "offload/engines.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"
#include "offload/swap_space.h"

namespace lm::offload_tests {

inline constexpr int64_t kChunk = 8192;

// An empty directory on a disk (beside the tests, as /tmp may be memory), writable by all, removed at the
// end.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  int entries() const;

 private:
  std::string path_;
};

// A file system of its own on a loop device. `why_not` is set instead where there is no root, mkfs or loop
// device.
class LoopDisk {
 public:
  // The device's blocks are those of a sparse file in `backing`; empty: in a directory of its own.
  LoopDisk(const std::string& file_system, int64_t bytes, int sector, const std::string& backing = "");
  ~LoopDisk();
  LoopDisk(const LoopDisk&) = delete;
  LoopDisk& operator=(const LoopDisk&) = delete;
  const std::string& path() const { return mount_; }
  const std::string& why_not() const { return why_not_; }

 private:
  TemporaryDirectory directory_;
  std::string image_, device_, mount_, why_not_;
  bool mounted_ = false;
};

// What `work` returned in a process of its own, made by fork: limits and filters set there end with it.
struct ChildResult {
  std::string text;
  int status = 0;  // as of waitpid; 0 is a good end
};
ChildResult run_in_child(const std::function<std::string()>& work);

// Bytes that depend on the seed and on their place.
void fill(std::span<std::byte> bytes, uint64_t seed);

// One checksum per chunk, taken when an array is written and compared when it comes back.
std::vector<uint64_t> chunk_checksums(std::span<const std::byte> bytes);
// Indices of the chunks that are not what was written.
std::vector<size_t> wrong_chunks(std::span<const std::byte> bytes, const std::vector<uint64_t>& checksums);

// Whether this machine lets us have a ring; a test that names io_uring skips without one.
bool ring_allowed();

// An IoQueue on a real engine, whose buffers are the pool's.
std::unique_ptr<IoQueue> make_queue(SwapSpace& space, const PinnedPool& pool, IoEngineKind kind,
                                    int64_t block = 64 * 1024, int depth = 8);

// Three arrays of different lengths, written, written again with other values beside reads, and read back,
// with `after` where an array's transfers follow each other. Whatever comes back is compared by checksum.
struct WorkloadResult {
  size_t chunks = 0;           // read back
  size_t wrong = 0;            // of these not as written
  std::vector<uint64_t> sums;  // of the last contents read
};
WorkloadResult run_workload(SwapSpace& space, IoQueue& queue, PinnedPool& pool, uint64_t seed);
int64_t workload_bytes();       // swap space that it needs
int64_t workload_pool_bytes();  // memory that it needs

}  // namespace lm::offload_tests
