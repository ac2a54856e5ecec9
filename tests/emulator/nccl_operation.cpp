#include "nccl_operation.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "emulator.h"

namespace emulator {
namespace {

using What = NcclWhat;
using Call = NcclCall;
using State = NcclState;

const char* name_of(ncclDataType_t type) {
  constexpr const char* kNames[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                    "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return kNames[type];
}

// One way between two ranks.
struct Transfer {
  int peer;
  bool sends;
  std::byte* bytes;
  size_t size;
  std::string label;
  size_t done = 0;
};

std::byte* memory(const void* p) {
  return static_cast<std::byte*>(inside(p));
}

void add_transfer(std::vector<Transfer>& all, const State& s, int peer, bool sends, void* bytes, size_t size,
                  const Call& call) {
  if (size == 0) return;
  if (peer != s.rank) return all.push_back({peer, sends, static_cast<std::byte*>(bytes), size, call.text()});
  throw std::runtime_error("a transfer to oneself");
}

template <class T>
void reduce_as(const Call& call, const std::vector<std::vector<std::byte>>& parts, std::byte* to) {
  for (size_t i = 0; i < call.count; ++i) {
    T sum{};
    for (size_t r = 0; r < parts.size(); ++r) {
      T value;
      std::memcpy(&value, parts[r].data() + i * sizeof value, sizeof value);
      sum = r == 0 ? value : call.op == ncclMax ? std::max(sum, value) : sum + value;
    }
    std::memcpy(to + i * sizeof sum, &sum, sizeof sum);
  }
}

void reduce(const Call& call, const std::vector<std::vector<std::byte>>& parts, std::byte* to) {
  if (call.op != ncclSum && call.op != ncclMax) throw std::runtime_error("an operation that is not emulated");
  switch (call.type) {
    case ncclInt32:
      return reduce_as<int32_t>(call, parts, to);
    case ncclInt64:
      return reduce_as<int64_t>(call, parts, to);
    case ncclFloat32:
      return reduce_as<float>(call, parts, to);
    case ncclFloat64:
      return reduce_as<double>(call, parts, to);
    default:
      throw std::runtime_error(std::string("a sum of ") + name_of(call.type) + " is not emulated");
  }
}

// The calls of one operation, run in its stream.
class Operation {
 public:
  Operation(State& state, const std::vector<Call>& calls) : s_(state), calls_(calls) {}

  void run() {
    for (const Call& call : calls_) {
      if (!call.collective()) continue;
      const std::string other = s_.region->post(call.number, call.text(), s_.stopped());
      if (s_.aborted) return;
      if (!other.empty()) return differ(other);
    }
    parts_.resize(calls_.size());
    for (size_t i = 0; i < calls_.size(); ++i) begin(calls_[i], parts_[i]);
    emulator_wait();
    for (size_t i = 0; i < calls_.size() && !s_.aborted && !differs_; ++i) {
      const Call& call = calls_[i];
      if (call.what == What::kAllReduce || call.what == What::kReduceScatter)
        reduce(call, parts_[i], memory(call.to));
    }
  }

 private:
  using Parts = std::vector<std::vector<std::byte>>;

  void differ(const std::string& how) {
    differs_ = true;
    s_.fail(ncclInvalidUsage, how);
    fault("NCCL: different calls: " + how);
  }

  void add(int peer, bool sends, const void* bytes, size_t size, const Call& call) {
    add_transfer(transfers_, s_, peer, sends, const_cast<void*>(bytes), size, call);
  }

  void begin(const Call& call, Parts& parts) {
    const size_t bytes = call.bytes();
    const std::byte* const from = call.from == nullptr ? nullptr : memory(call.from);
    std::byte* const to = call.to == nullptr ? nullptr : memory(call.to);
    if (call.what == What::kSend) return add(call.peer, true, from, bytes, call);
    if (call.what == What::kReceive) return add(call.peer, false, to, bytes, call);
    if (call.what == What::kAllGather) std::memmove(to + static_cast<size_t>(s_.rank) * bytes, from, bytes);
    if (call.what == What::kBroadcast && s_.rank == call.peer) std::memmove(to, from, bytes);
    const bool reduces = call.what == What::kAllReduce || call.what == What::kReduceScatter;
    if (reduces) parts.resize(static_cast<size_t>(s_.ranks));
    for (int r = 0; r < s_.ranks; ++r) {
      const auto at = static_cast<size_t>(r) * bytes;
      if (reduces) {
        const std::byte* const part = from + (call.what == What::kAllReduce ? 0 : at);
        auto& mine = parts[static_cast<size_t>(r)];
        mine.resize(bytes);
        if (r == s_.rank) std::memcpy(mine.data(), part, bytes);
        if (r != s_.rank) add(r, true, part, bytes, call), add(r, false, mine.data(), bytes, call);
      } else if (r != s_.rank && call.what == What::kAllGather) {
        add(r, true, to + static_cast<size_t>(s_.rank) * bytes, bytes, call);
        add(r, false, to + at, bytes, call);
      } else if (r != s_.rank && (s_.rank == call.peer || r == call.peer)) {
        add(r, s_.rank == call.peer, to, bytes, call);
      }
    }
  }

  // Moves a piece of what is not done, of each way between two ranks the first.
  bool move_some() {
    bool all = true;
    std::vector<char> begun(static_cast<size_t>(2 * s_.ranks), 0);
    for (Transfer& t : transfers_) {
      if (t.done == t.size) continue;
      all = false;
      char& way = begun[static_cast<size_t>(2 * t.peer + (t.sends ? 1 : 0))];
      if (std::exchange(way, 1) != 0) continue;
      const size_t size = std::min(t.size - t.done, NcclRegion::kPiece);
      std::string wrong;
      const bool moved = t.sends ? s_.region->send(t.peer, t.label, t.bytes + t.done, size)
                                 : s_.region->receive(t.peer, t.label, t.bytes + t.done, size, &wrong);
      if (moved) t.done += size;
      if (!wrong.empty()) {
        differ("rank " + std::to_string(s_.rank) + " awaits " + t.label + " from rank " +
               std::to_string(t.peer) + ", which sends " + wrong);
        return true;
      }
    }
    return all;
  }

  // A send is done when it has been received.
  void emulator_wait() {
    nccl_wait([this] { return move_some(); }, s_.stopped());
    for (const Transfer& t : transfers_) {
      if (t.sends && !differs_) nccl_wait([&] { return s_.region->taken(t.peer); }, s_.stopped());
    }
  }

  State& s_;
  const std::vector<Call>& calls_;
  std::vector<Transfer> transfers_;
  std::vector<Parts> parts_;
  bool differs_ = false;
};

}  // namespace

size_t size_of(ncclDataType_t type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[type];
}

std::string NcclCall::text() const {
  constexpr const char* kNames[] = {"a message",  "a message",  "broadcast",
                                    "all-gather", "all-reduce", "reduce-scatter"};
  std::string out = kNames[static_cast<int>(what)];
  if (what == What::kBroadcast) out += " from " + std::to_string(peer);
  if (what == What::kAllReduce || what == What::kReduceScatter) out += " op " + std::to_string(op);
  out += " of " + std::to_string(count) + " x " + name_of(type);
  return collective() ? out + ", call " + std::to_string(number) : out;
}

void run_nccl(NcclState& state, const std::vector<NcclCall>& calls) {
  Operation(state, calls).run();
}

}  // namespace emulator
