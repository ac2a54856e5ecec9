// libnccl.so.2 of the emulator: communicators of processes on one machine, whose operations are work in
// streams of the stand-in runtime. Sums are made in the order of ranks. As in NCCL an operation is done when
// the others have come to theirs, and until then its stream stands still; a communicator that does not block
// begins later than it says, and so does its first operation; whoever is lost is waited for until the
// communicator is aborted. What NCCL leaves undefined, different calls on different ranks, is named.
//
//   EMULATOR_NCCL=fail:RANK:CALL   that call (they count from 1) of that rank never ends,
//                              and its communicator reports ncclRemoteError
//   EMULATOR_NCCL=hang:RANK:CALL   it never ends, and nothing is reported
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_set>
#include <vector>

#include "emulator.h"
#include "nccl_operation.h"

namespace {

using What = emulator::NcclWhat;
using Call = emulator::NcclCall;
using State = emulator::NcclState;
using emulator::NcclRegion;

std::mutex live_mutex;
std::unordered_set<ncclComm_t>& live() {
  static auto* const all = new std::unordered_set<ncclComm_t>;
  return *all;
}

thread_local std::string last_error;
ncclResult_t refuse(ncclResult_t how, const std::string& why) {
  last_error = why;
  std::fprintf(stderr, "emulator: NCCL: %s\n", why.c_str());
  return how;
}

enum class Trouble : uint8_t { kNone, kFails, kHangs };

// "fail:1:7": whether this is that call.
Trouble trouble_of(const State& s) {
  int rank = -1;
  unsigned long call = 0;
  char how[5] = "";
  const char* const text = std::getenv("EMULATOR_NCCL");
  const bool here = text != nullptr && std::sscanf(text, "%4[a-z]:%d:%lu", how, &rank, &call) == 3 &&
                    rank == s.rank && call == s.operations;
  if (!here) return Trouble::kNone;
  return std::strcmp(how, "hang") == 0 ? Trouble::kHangs : Trouble::kFails;
}

std::string card() {
  int device = 0;
  cudaDeviceProp properties;
  cudaGetDevice(&device);
  cudaGetDeviceProperties(&properties, device);
  const char* const host = std::getenv("NCCL_HOSTID");
  std::string out = host == nullptr ? "" : std::string(host) + ":";
  for (const char byte : properties.uuid.bytes) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(byte));
    out += hex;
  }
  return out;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<State> state = std::make_shared<State>();
};

namespace {

State* state_of(ncclComm_t comm) {
  const std::lock_guard lock(live_mutex);
  return live().contains(comm) ? comm->state.get() : nullptr;
}

struct Queued {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<Call> calls;
};
thread_local std::vector<Queued> queued;
thread_local int depth = 0;

std::string operation_name(const std::vector<Call>& calls) {
  constexpr const char* kNames[] = {"exchange",   "exchange",   "broadcasts",
                                    "all-gather", "all-reduce", "reduce-scatter"};
  return std::string("nccl ") + kNames[static_cast<int>(calls.front().what)];
}

void launch(const std::shared_ptr<State>& s, cudaStream_t stream, std::vector<Call> calls, Trouble trouble) {
  std::vector<emulator::Access> accesses;
  for (const Call& c : calls) {
    const auto n = static_cast<int64_t>(c.bytes()), all = n * s->ranks;
    if (c.from != nullptr)
      accesses.push_back(emulator::reads(c.from, c.what == What::kReduceScatter ? all : n));
    if (c.to != nullptr) accesses.push_back(emulator::writes(c.to, c.what == What::kAllGather ? all : n));
  }
  const std::string name = operation_name(calls);
  emulator::enqueue(
      stream, emulator::Kind::kNccl, name,
      [s, trouble, calls = std::move(calls)] {
        if (trouble == Trouble::kFails)
          s->fail(ncclRemoteError, "remote process exited or there was a network error");
        if (trouble != Trouble::kNone) {
          emulator::nccl_wait([] { return false; }, s->stopped());
        } else if (!s->aborted) {
          emulator::run_nccl(*s, calls);
        }
      },
      std::move(accesses));
}

ncclResult_t end_of(Queued& q) {
  State& s = *q.comm->state;
  if (s.result == ncclInProgress) return refuse(ncclInvalidUsage, "a call while another is in progress");
  if (s.result != ncclSuccess) return static_cast<ncclResult_t>(s.result.load());
  ++s.operations;
  const Trouble trouble = trouble_of(s);
  if (s.blocking || s.operations > 1) {
    launch(q.comm->state, q.stream, std::move(q.calls), trouble);
    return ncclSuccess;
  }
  // The first one connects the ranks, for which nobody waits here.
  s.result = ncclInProgress;
  if (s.beginner.joinable()) s.beginner.join();
  s.beginner = std::thread([state = q.comm->state, stream = q.stream, calls = std::move(q.calls), trouble] {
    usleep(5000);
    launch(state, stream, calls, trouble);
    int expected = ncclInProgress;
    state->result.compare_exchange_strong(expected, ncclSuccess);
  });
  return ncclInProgress;
}

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, Call call) {
  State* const s = state_of(comm);
  if (s == nullptr) return refuse(ncclInvalidArgument, "a communicator that is not alive");
  if (call.peer >= s->ranks) return refuse(ncclInvalidArgument, "no rank " + std::to_string(call.peer));
  for (const void* p : {call.from, static_cast<const void*>(call.to)}) {
    if (p != nullptr && call.count > 0 && !emulator::device_can_use(p))
      return refuse(ncclInvalidArgument, "memory that the GPU cannot use");
  }
  if (call.collective()) call.number = ++s->collectives;
  const auto same = [&](const Queued& q) { return q.comm == comm && q.stream == stream; };
  auto it = std::find_if(queued.begin(), queued.end(), same);
  if (it == queued.end()) it = queued.insert(queued.end(), Queued{comm, stream, {}});
  it->calls.push_back(call);
  if (depth > 0) return ncclSuccess;
  Queued alone = std::move(*it);
  queued.clear();
  return end_of(alone);
}

void begin_communicator(State& s, const std::string& name, const std::string& card) {
  try {
    s.region = std::make_unique<NcclRegion>(name, s.rank, s.ranks);
    const std::string trouble = s.region->meet(card, s.stopped());
    if (!trouble.empty()) return s.fail(ncclInvalidUsage, trouble);
    s.result = ncclSuccess;
  } catch (const std::exception& e) {
    s.fail(ncclSystemError, e.what());
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return *version = NCCL_VERSION_CODE, ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> count{0};
  std::memset(id, 0, sizeof *id);
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  std::snprintf(id->internal, sizeof id->internal, "/emulator-nccl-%d-%d-%ld", getpid(), ++count,
                now.tv_nsec);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config != nullptr && config->magic != 0xcafebeef)
    return refuse(ncclInvalidArgument, "no configuration");
  *comm = new ncclComm;
  State& s = *(*comm)->state;
  s.rank = rank, s.ranks = ranks;
  s.blocking = config == nullptr || config->blocking != 0;
  {
    const std::lock_guard lock(live_mutex);
    live().insert(*comm);
  }
  s.result = ncclInProgress;
  const auto begin = [state = (*comm)->state, name = std::string(id.internal), here = card()] {
    begin_communicator(*state, name, here);
  };
  if (!s.blocking) return s.beginner = std::thread(begin), ncclInProgress;
  begin();
  return static_cast<ncclResult_t>(s.result.load());
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  State* const s = state_of(comm);
  if (s == nullptr) return refuse(ncclInvalidArgument, "a communicator that is not alive is aborted");
  s->aborted = true;
  if (s->beginner.joinable()) s->beginner.join();
  const std::lock_guard lock(live_mutex);
  live().erase(comm);
  return delete comm, ncclSuccess;
}
// As a rule nobody who is alive has anything under way.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  State* const s = state_of(comm);
  if (s == nullptr) return refuse(ncclInvalidArgument, "a communicator that is not alive is destroyed");
  if (s->beginner.joinable()) s->beginner.join();
  const std::lock_guard lock(live_mutex);
  live().erase(comm);
  return delete comm, ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  const State* const s = state_of(comm);
  if (s == nullptr) return refuse(ncclInvalidArgument, "a communicator that is not alive is asked");
  return *result = static_cast<ncclResult_t>(s->result.load()), ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t comm) {
  State* const s = comm == nullptr ? nullptr : state_of(comm);
  if (s == nullptr) return last_error.c_str();
  const std::lock_guard lock(s->mutex);
  last_error = s->error;
  return last_error.c_str();
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
  return *ranks = comm->state->ranks, ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return *rank = comm->state->rank, ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  return ++depth, ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (depth == 0) return refuse(ncclInvalidUsage, "a group ends that never began");
  if (--depth > 0) return ncclSuccess;
  std::vector<Queued> all = std::move(queued);
  queued.clear();
  ncclResult_t result = ncclSuccess;
  for (Queued& q : all) {
    const ncclResult_t one = end_of(q);
    if (one != ncclSuccess) result = one;
  }
  return result;
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, stream,
             {.what = What::kSend, .from = from, .to = nullptr, .count = count, .type = type, .peer = peer});
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, stream,
             {.what = What::kReceive, .from = nullptr, .to = to, .count = count, .type = type, .peer = peer});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const State* const s = state_of(comm);
  return add(comm, stream,
             {.what = What::kBroadcast,
              .from = s != nullptr && s->rank == root ? from : nullptr,
              .to = to,
              .count = count,
              .type = type,
              .peer = root});
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm, stream, {.what = What::kAllGather, .from = from, .to = to, .count = count, .type = type});
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream,
             {.what = What::kAllReduce, .from = from, .to = to, .count = count, .type = type, .op = op});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream,
             {.what = What::kReduceScatter, .from = from, .to = to, .count = count, .type = type, .op = op});
}

}  // extern "C"
#pragma GCC visibility pop
