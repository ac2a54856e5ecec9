// A stand-in communicator and the calls of one of its operations, run in the stream that they were given.
#pragma once

#include <nccl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl_region.h"

namespace emulator {

size_t size_of(ncclDataType_t type);

enum class NcclWhat : uint8_t { kSend, kReceive, kBroadcast, kAllGather, kAllReduce, kReduceScatter };

struct NcclCall {
  NcclWhat what;
  const void* from;
  void* to;
  size_t count;
  ncclDataType_t type;
  int peer = -1;  // or root
  ncclRedOp_t op = ncclSum;
  uint64_t number = 0;  // of collectives

  size_t bytes() const { return count * size_of(type); }
  bool collective() const { return what != NcclWhat::kSend && what != NcclWhat::kReceive; }
  std::string text() const;  // what must be the same on all ranks
};

// What a communicator is; operations that are still queued when it is aborted keep it.
struct NcclState {
  int rank = 0, ranks = 1;
  bool blocking = true;
  std::unique_ptr<NcclRegion> region;
  std::atomic<bool> aborted{false};
  std::atomic<int> result{ncclSuccess};
  std::mutex mutex;  // guards the error
  std::string error;
  uint64_t collectives = 0, operations = 0;
  std::thread beginner;  // of what a communicator that does not block begins later

  void fail(ncclResult_t how, const std::string& why) {
    const std::lock_guard lock(mutex);
    error = why;
    result = how;
  }
  NcclRegion::Stopped stopped() {
    return [this] { return aborted.load(); };
  }
};

// All of them; returns when they are done, when the communicator is aborted, or when ranks call different
// things.
void run_nccl(NcclState& state, const std::vector<NcclCall>& calls);

}  // namespace emulator
