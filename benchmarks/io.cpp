// Our side of io.py: the queue on a real disk, and the speed of the checksum.
//
//   bench_io serve DIRECTORY [MiB = 1024] [block KiB = 1024] [depth = 16] [engine = auto | threads] [pages =
//   huge | small]
//     answers each line "read", "write" or "both" of its input with one JSON line; small pages: those of
//     fio's memory
//   bench_io checksum
//     GB/s of every variant that this machine runs, on 8 KiB chunks in the L2 cache and from memory
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/error.h"
#include "offload/engines.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"

namespace {

using namespace lm;

double kernel_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_stime.tv_sec) + static_cast<double>(usage.ru_stime.tv_usec) * 1e-6;
}

double user_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec) + static_cast<double>(usage.ru_utime.tv_usec) * 1e-6;
}

class Server {
 public:
  Server(const std::string& directory, int64_t bytes, int64_t block, int depth, IoEngineKind engine)
      : block_(block),
        depth_(static_cast<size_t>(depth)),
        space_({{directory}}, bytes),
        pool_(DeviceType::kCpu, depth * block),
        queue_(
            space_,
            [this, engine, depth] {
              const std::span<std::byte> buffers[] = {pool_.memory()};
              return make_engine(engine, {.files = space_.files(), .buffers = buffers, .depth = depth},
                                 nullptr);
            },
            block) {
    for (int64_t i = 0; i < bytes / block; ++i) extents_.push_back(space_.allocate(block));
    std::mt19937_64 random(1);
    for (size_t i = 0; i < depth_; ++i) {
      buffers_.push_back(pool_.lease(block));
      // Random, as fio's: what stands behind a virtual disk may be quick with bytes that repeat.
      for (int64_t k = 0; k < block; k += 8) {
        const uint64_t word = random();
        std::memcpy(buffers_.back().data() + k, &word, 8);
      }
    }
  }

  // Moves the file's size once, as many blocks under way as there are buffers: fio's footprint. "both": reads
  // and writes in turn, each through the file from its start.
  void run(const std::string& mode) {
    const size_t n = extents_.size();
    std::vector<Ticket> tickets(depth_, 0);
    const double start = monotonic_seconds(), kernel = kernel_seconds(), user = user_seconds();
    for (size_t i = 0; i < n; ++i) {
      const size_t slot = i % depth_;
      queue_.wait(tickets[slot]);
      std::byte* const memory = buffers_[slot].data();
      const bool both = mode == "both", read = mode == "read" || (both && i % 2 == 0);
      const Extent& extent = extents_[both ? i / 2 : i];
      tickets[slot] = read ? queue_.read(extent, memory, block_, "the benchmark")
                           : queue_.write(extent, memory, block_, "the benchmark");
    }
    queue_.drain();
    const double gb = static_cast<double>(n) * static_cast<double>(block_) / 1e9;
    const double seconds = monotonic_seconds() - start;
    std::printf("{\"gbps\": %.4f, \"kernel_ms_per_gb\": %.2f, \"user_ms_per_gb\": %.2f}\n", gb / seconds,
                (kernel_seconds() - kernel) * 1e3 / gb, (user_seconds() - user) * 1e3 / gb);
    std::fflush(stdout);
  }

  std::string description() const {
    return queue_.description() + (space_.direct(0) ? ", O_DIRECT" : ", buffered");
  }

 private:
  const int64_t block_;
  const size_t depth_;
  SwapSpace space_;
  PinnedPool pool_;
  IoQueue queue_;
  std::vector<Extent> extents_;
  std::vector<PinnedBlock> buffers_;
};

int checksum_speed() {
  constexpr size_t kChunk = 8192, kCache = 256 * kKiB, kMemory = 512 * kMiB;
  const Memory memory(DeviceType::kCpu, kMemory);
  std::memset(memory.data(), 0x5A, kMemory);
  uint64_t sum = 0;
  const auto speed = [&](size_t bytes) {
    double best = 1e9;
    const size_t passes = 2 * kMemory / bytes;
    for (int round = 0; round < 5; ++round) {
      const double start = monotonic_seconds();
      for (size_t pass = 0; pass < passes; ++pass) {
        for (size_t i = 0; i < bytes; i += kChunk)
          sum ^= chunk_checksum({static_cast<const std::byte*>(memory.data()) + i, kChunk});
      }
      best = std::min(best, monotonic_seconds() - start);
    }
    return static_cast<double>(passes * bytes) / best / 1e9;
  };
  const double cache = speed(kCache), dram = speed(kMemory);
  std::printf("XXH3-64 of 8 KiB chunks, best of 5: %.1f GB/s from L2, %.1f GB/s from DRAM\n", cache, dram);
  std::printf("(their sum: %llx)\n", static_cast<unsigned long long>(sum));  // so that they are computed
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    const std::string verb = count > 1 ? words[1] : "";
    const auto number = [&](int i, int64_t otherwise) {
      return count > i ? std::atoll(words[i]) : otherwise;
    };
    if (verb == "checksum") return checksum_speed();
    if (verb != "serve" || count < 3) {
      std::fprintf(stderr,
                   "bench_io serve DIRECTORY [MiB] [block KiB] [depth] [engine] | bench_io checksum\n");
      return 2;
    }
    Server server(
        words[2], number(3, 1024) * kMiB, number(4, 1024) * kKiB, static_cast<int>(number(5, 16)),
        count > 6 && std::string(words[6]) == "threads" ? IoEngineKind::kThreads : IoEngineKind::kAuto);
    std::printf("{\"engine\": \"%s\"}\n", server.description().c_str());
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) server.run(line);
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s", error.report().c_str());
    return static_cast<int>(error.code());
  }
}
