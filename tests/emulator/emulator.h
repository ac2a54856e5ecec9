// The emulator's GPU as its other parts see it: streams take work, memory says what it is, operations are
// counted. Any thread may call. Free of CUDA's headers, so that the files that stand in for them can include
// it; a stream is a cudaStream_t.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define EMULATOR_EXPORT __attribute__((visibility("default")))

namespace emulator {

// What one operation touches: `rows` ranges of `bytes`, `stride` apart.
struct Access {
  const void* begin;
  int64_t bytes;
  bool write;
  int64_t rows = 1, stride = 0;
};
inline Access reads(const void* p, int64_t bytes, int64_t rows = 1, int64_t stride = 0) {
  return {p, bytes, false, rows, stride};
}
inline Access writes(const void* p, int64_t bytes, int64_t rows = 1, int64_t stride = 0) {
  return {p, bytes, true, rows, stride};
}

// What an operation is, for the counters.
enum class Kind : uint8_t { kKernel, kAten, kGemm, kCopy, kNccl, kOrder };

// Runs `work` in the stream's thread, in order, with access to device memory.
EMULATOR_EXPORT void enqueue(void* stream, Kind kind, std::string what, std::function<void()> work,
                             std::vector<Access> accesses = {});
// ---- From the kernels that the calling stream thread runs. `place`: where the bytes really are (inside()).
// Whether accesses are told to the order checker: touched() is of no use otherwise.
EMULATOR_EXPORT bool checks_order();
// An access of the operation that runs.
EMULATOR_EXPORT void touched(const void* place, int64_t bytes, bool write);
// Bytes that it read and wrote, for the counters; of them, in registered host memory: these cross the link.
EMULATOR_EXPORT void moved(int64_t bytes, int64_t of_host);
// What of the page at `place` may be touched: the part of it that is in one allocation of the device, or in
// one registered block. Empty (begin = end) elsewhere; `device`: the page is the device's all the same;
// `read_only`: the block is registered so.
struct Extent {
  uintptr_t begin = 0, end = 0;
  bool device = false;
  bool read_only = false;
};
EMULATOR_EXPORT Extent extent_of_page(const void* place);

// What fresh memory of the device holds, shared memory as well: EMULATOR_GARBAGE, or 0xFF, which makes NaNs
// and -1.
EMULATOR_EXPORT int garbage();
EMULATOR_EXPORT void set_garbage(int byte);

// Where the bytes of device memory really are, for work that runs in a stream; other memory is where it is.
// What cudaMalloc returns can be reached by nobody: a host thread that follows it faults.
EMULATOR_EXPORT void* inside(const void* p);
// Memory that a kernel may use: the device's, or host memory that is registered.
EMULATOR_EXPORT bool device_can_use(const void* p);
// As an illegal access in a kernel: says so, and every later call fails.
EMULATOR_EXPORT void fault(const std::string& what);
// What the calling stream thread is doing; "" elsewhere.
EMULATOR_EXPORT const char* current_operation();

// Since the process began, or the last reset. Work counts when it is enqueued, but for the bytes that kernels
// touch, which count when they run: wait before reading them.
struct Counters {
  int64_t launches = 0;         // of our own kernels
  int64_t aten_operations = 0;  // of ATen's, GEMMs apart
  int64_t gemms = 0;
  int64_t collectives = 0;      // of NCCL's, a group of calls as one
  int64_t host_waits = 0;       // times that a host thread had to wait for a stream
  int64_t pageable_copies = 0;  // copies with host memory that is not registered
  int64_t allocations = 0;      // cudaMalloc and cudaFree
  int64_t registrations = 0;    // cudaHostRegister, cudaHostAlloc and their ends
  int64_t bytes_to_device = 0, bytes_to_host = 0, bytes_inside = 0;  // of copies, fills not counted
  int64_t bytes_in_place = 0;  // that kernels read and wrote in registered host memory
  struct Name {
    int64_t times = 0, bytes = 0;
  };
  std::map<std::string, Name> by_name;  // operations, in the stream's words without sizes
};
EMULATOR_EXPORT Counters counters();
EMULATOR_EXPORT void reset_counters();

}  // namespace emulator
