// Where the ranks of a stand-in communicator meet: memory that their processes share, named by the unique id.
// A board on which each rank posts the collective that it has come to, and from every rank to every other one
// a channel for one piece at a time, labelled with the call that it belongs to. What never comes is waited
// for until `stopped` says so: a peer that is gone hangs this one, as it would on GPUs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emulator {

class NcclRegion {
 public:
  static constexpr int kMostRanks = 64;
  static constexpr size_t kPiece = 1 << 16, kText = 120;
  using Stopped = std::function<bool()>;

  // Makes it, or finds what another rank has made. Throws std::runtime_error.
  NcclRegion(const std::string& name, int rank, int ranks);
  ~NcclRegion();
  NcclRegion(const NcclRegion&) = delete;
  NcclRegion& operator=(const NcclRegion&) = delete;

  // This rank is there, on that card; waits for all others. "" or why they cannot work together.
  std::string meet(const std::string& card, const Stopped& stopped);
  // This rank comes to a collective; waits for all others to come to theirs of the same number. "" or which
  // other rank calls something else.
  std::string post(uint64_t call, const std::string& text, const Stopped& stopped);

  // A piece of at most kPiece bytes to or from another rank, if there is room, or one has come. `wrong`: what
  // the piece that has come belongs to, where that is not `label`.
  bool send(int to, const std::string& label, const void* bytes, size_t size);
  bool receive(int from, const std::string& label, void* bytes, size_t size, std::string* wrong);
  // Everything that was sent there has been taken.
  bool taken(int to) const;

 private:
  struct Place {
    std::atomic<uint64_t> calls;
    std::atomic<uint32_t> here;
    char card[kText];
    char text[2][kText];  // of even calls and of odd ones
  };
  struct Channel {
    alignas(64) std::atomic<uint64_t> sent;
    std::atomic<uint64_t> taken;
    uint64_t size;
    char label[kText];
    std::byte bytes[kPiece];
  };
  Place& place(int rank) const { return reinterpret_cast<Place*>(memory_)[rank]; }
  Channel& channel(int from, int to) const;

  const std::string name_;
  const int rank_, ranks_;
  std::byte* memory_;
  size_t size_;
};

// Until `ready`, or `stopped`: gives the first.
bool nccl_wait(const std::function<bool()>& ready, const NcclRegion::Stopped& stopped);

}  // namespace emulator
