// The inside of the stand-in runtime (libcudart): its settings, streams, events and memory. Private to the
// files of that library.
//
// A stream is a thread with a queue, so streams are late, early and beside each other as on a GPU. Device
// memory has two addresses: the one that cudaMalloc returns, at which there is nothing, so that a host thread
// that follows it ends with a message, and, kAlias above it, the bytes, which only work in a stream is given
// (inside()). Every operation carries a vector clock of what is known to be done before it; the order checker
// (order.cpp) compares them.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "emulator.h"
#include "settings.h"

namespace emulator {

using Clock = std::vector<uint64_t>;  // by stream number: the last operation that is known to be done
void join(Clock& a, const Clock& b);

struct Stream;

// A point in a stream.
struct Point {
  Stream* stream = nullptr;
  uint64_t number = 0;
  Clock clock;
  std::mutex mutex;  // guards the rest
  std::condition_variable changed;
  bool done = false;
  int64_t done_ns = 0;
  void reach();
  bool reached();
  void wait();
};
using PointPtr = std::shared_ptr<Point>;

struct Operation {
  Kind kind = Kind::kOrder;
  std::string what;
  std::function<void()> work;
  std::vector<Access> accesses;
  Clock clock;
};

struct Stream {
  size_t number = 0;  // in State::streams
  int device = 0;
  bool blocking = false;           // waits for its device's null stream and is waited for by it
  Clock clock;                     // guarded by State::mutex, as `names` is
  std::vector<std::string> names;  // of its operations, where order is checked
  std::mutex mutex;                // guards the rest
  std::condition_variable changed;
  std::deque<Operation> queue;
  bool closing = false;
  bool ended = false;   // closed, and nothing is left
  uint64_t wanted = 0;  // with EMULATOR_LAZY: operations up to this one may run
  std::minstd_rand random;
  void want(uint64_t upto);
};

struct Event {
  PointPtr point;
};

struct Allocation {
  size_t bytes = 0, mapped = 0;
  char* base = nullptr;
  int device = 0;
};

// Read once from the environment; README.md says what each does.
struct Settings {
  Settings();
  std::vector<Card> cards;  // as CUDA numbers them
  bool trace, pin, read_only, lazy, poison, pageable_waits;
  int races;
  unsigned seed = 0, delay_us = 0;
  int hanging = -1;       // the card whose kernels never end, in PCI order, once there is
  std::string hang_file;  // this file
  std::string peak_dir;   // where each process says what it has taken
};

inline constexpr uintptr_t kBase = 0x200000000000, kSpan = 1ULL << 42, kAlias = kSpan;
inline constexpr size_t kPage = 4096;
// Stands in what cudaMalloc maps beside an allocation.
inline constexpr unsigned char kCanary = 0xC5;

struct State {
  State();
  Settings settings;
  std::atomic<int> sticky{0};
  std::atomic<int> garbage;
  std::mutex mutex;  // guards the rest
  std::map<uintptr_t, Allocation> device;
  std::map<uintptr_t, size_t> pinned;
  std::unordered_set<uintptr_t> read_only;  // of `pinned`: the device may not write there
  std::unordered_set<void*> host_allocated;
  uintptr_t next = kBase;
  std::vector<int64_t> used;     // of each device
  int64_t most_used = 0;         // of all of them, so far
  std::vector<Stream*> streams;  // the null streams of the devices first
  Clock host;                    // what the host has waited for
};
State& state();  // never destroyed: streams outlive main

extern thread_local cudaError_t last_error;
extern thread_local int device;   // the calling thread's current one
extern thread_local bool issues;  // whether the calling thread has ever put anything into a stream

// ---- errors
cudaError_t failed(cudaError_t error);
cudaError_t ok();
// What real CUDA refuses, or has no meaning: always worth a line.
cudaError_t refused(cudaError_t error, const std::string& why);

// ---- streams
Stream* make_stream(bool blocking, int device);
Stream* find(cudaStream_t handle);
PointPtr mark(Stream* stream);
void order_after(Stream* stream, const PointPtr& point);
void host_waited(const PointPtr& point);  // a wait is known to be over
void host_wait(const PointPtr& point);
// The null stream of a device and its blocking streams wait for each other.
std::vector<Stream*> partners(Stream* stream);
void submit(Stream* stream, Operation operation);
void synchronize_all();
bool any_busy();

// ---- memory
bool is_device_address(const void* p);
// The calls of cudart, with the state's mutex taken inside.
enum class Where { kDevice, kPinned, kPageable };
cudaError_t locate(const void* p, size_t bytes, Where* where, int* device = nullptr);
// With the mutex held: whether the registered block, or cudaMalloc's, that holds p holds all `bytes`.
bool pinned_holds(const void* p, size_t bytes, bool* partly = nullptr);
bool device_holds(const void* p, size_t bytes);

// ---- the order checker
void check_order(const Operation& operation, const Stream& stream);
void check_order(uintptr_t begin, int64_t bytes, bool write, const Operation& operation,
                 const Stream& stream);
void forget_order(uintptr_t begin, size_t bytes);

// ---- the counters
void count(const Operation& operation);
void count_moved(const Operation& operation, int64_t bytes, int64_t of_host);
void count_wait();
void count_copy(Where from, Where to, int64_t bytes);
void count_allocation();
void count_registration();

}  // namespace emulator
