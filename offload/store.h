// Arrays of state whose home is not near: optimizer tiles, weights, gradients, saved activations, in swap
// space or in pinned host memory. Compute works on an array only while it lies in one of the store's slots;
// which array comes into which slot, and when, is decided by the schedule (schedule/transfers.h), so that
// nothing here depends on timing. Every chunk of 8 KiB that goes to disk has its checksum kept in memory, and
// is compared with it before it is used again.
//
// On the CPU slots are pinned host memory. On a GPU they are device memory: copies run on streams of their
// own, one each way, and what comes from disk or goes there passes through host memory, slot for slot
// (store_near.cpp).
//
// The store owns slots (leased from the pinned pool) and extents; queue and pool belong to the rank. The
// rank's compute thread calls; check and stamp may also be called from its OpenMP threads on disjoint ranges.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "base/device_clock.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"
#include "offload/swap_space.h"

namespace lm {

inline constexpr int64_t kChecksumChunk = 8192;  // bytes

struct StoreSetup {
  std::vector<int64_t> bytes;                // of each array; 0: not in this store
  std::function<std::string(int64_t)> name;  // of an array, for messages: "weights of layers.3"
  int64_t slots = 0;
  bool verify = true;     // false: trust the disk (offload.verify)
  int threads = 1;        // that check and stamp whole arrays
  bool separate = false;  // slots are device memory, apart from host memory (tests: also on the CPU)
  std::vector<char> in_host =
      {};                        // per array, with `separate`: home is pinned host memory; empty: all on disk
  StreamView stream = {};        // that compute uses the slots on
  DeviceClock* clock = nullptr;  // borrowed; told of copies and of compute's waits, where slots are a GPU's
};

// What a slot holds when its array is used.
enum class Arrival : uint8_t {
  kKnown,      // what was there at its last use
  kUnchecked,  // what came from disk, not yet compared with what was written
  kZeros,      // the array was never written
};

class Store {
 public:
  // Memory and disk that such a store takes.
  static int64_t slot_bytes(const std::vector<int64_t>& array_bytes);  // of one slot
  static int64_t swap_bytes(const std::vector<int64_t>& array_bytes, const std::vector<char>& in_host = {});
  static int64_t pinned_bytes(const StoreSetup& setup);

  // `space` and `queue` may be null where nothing is on disk.
  Store(StoreSetup setup, SwapSpace* space, IoQueue* queue, PinnedPool& pool);
  // Nothing of the slots is in flight afterwards.
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // The schedule's transfers; none of them waits. An array that was never written comes as zeros.
  void fetch(int64_t array, int64_t slot);
  void claim(int64_t array, int64_t slot);
  // An array that was fetched and not used since (a skipped step) is what its home has: nothing is written.
  void write_back(int64_t array);

  // The array leaves its slot; what was not written back is dropped.
  void forget(int64_t array);

  // Lets what has arrived go on: from host memory to the device, from there to disk. Never waits; to be
  // called between operations: what was used has been enqueued by then, and the slot's next copy waits for
  // that and for nothing later. Does nothing where slots are host memory.
  void poll();

  // The array in its slot: waits for its fetch and compares it with what was written. Throws Error(21, 22).
  std::byte* use(int64_t array);
  // The same for a caller that compares chunk by chunk while it works, where *arrival says that this is due.
  std::byte* use_unchecked(int64_t array, Arrival* arrival);
  // Bytes [begin, end) of an array in its slot, both multiples of the chunk (or the array's end): whether
  // they are what was written; and what they are now, for the write to come.
  bool intact(int64_t array, int64_t begin, int64_t end) const;
  void stamp(int64_t array, int64_t begin, int64_t end);
  // Every chunk has been stamped since its last change, so that write_back need not.
  void all_stamped(int64_t array) { slot_of(array).stamped = true; }
  // Reads the range once more from its home, past what the system keeps of it: whether it is intact now.
  bool reread(int64_t array, int64_t begin, int64_t end);
  // Throws Error(22) with the place of the first chunk that is not intact.
  [[noreturn]] void report_damage(int64_t array) const;

  // Bytes of the array from `begin` on as they are now, wherever it is, into host memory. Waits; nothing
  // moves.
  void read(int64_t array, int64_t begin, std::span<std::byte> out);
  // After an error: every slot is empty and every array as if it was never written, to be written anew. The
  // queue has nothing under way.
  void reset();

  // From now on only the first `bytes` of the array count (a shorter batch's activations).
  void resize(int64_t array, int64_t bytes);
  int64_t bytes(int64_t array) const { return arrays_[static_cast<size_t>(array)].bytes; }
  bool holds(int64_t array) const;
  bool verifies() const { return setup_.verify; }
  bool separate() const { return setup_.separate; }
  // Never written so far, so that its bytes are zeros without meaning.
  bool fresh(int64_t array) const { return arrays_[static_cast<size_t>(array)].fresh; }

  double wait_seconds() const { return wait_seconds_; }  // spent in use, unless a clock counts it

 private:
  struct Array {
    Extent extent;
    int64_t bytes = 0;
    int64_t slot = -1;               // where it lies, or is on its way to
    Ticket written = 0;              // its last write
    std::byte* host_home = nullptr;  // null: its home is the disk
    int64_t left_from = -1;          // slot from which it last went to its home in host memory
    bool fresh = true;
    size_t first_chunk = 0;  // of its checksums
  };
  struct Slot {
    int64_t array = -1;
    Ticket read = 0, written = 0;  // the last of each
    Ticket before = 0;  // the write of what the slot held before: it must be done before the slot is filled
    Arrival arrival = Arrival::kKnown;
    bool stamped = false;  // the caller has stamped what it made of it
    bool touched = false;  // used since it came
  };
  // The device's side of a slot.
  struct NearSlot {
    explicit NearSlot(DeviceType device) : used(device), arrived(device), left(device) {}
    Event used, arrived, left;  // compute is done with it; copied in; copied out
    bool reading = false;       // its bytes are on their way from disk to host memory
    bool arriving = false;      // and from there to the device
    int64_t leaving = -1;       // the array whose bytes are on their way to host memory, and then to disk
    bool filled_here = false;   // taken over by compute, not by a copy
    bool in_use = false;        // by work that may still be enqueued: `used` is yet to be recorded
  };

  Array& array(int64_t index);
  const Array& array(int64_t index) const;
  Slot& slot_of(int64_t array);
  std::byte* memory(int64_t slot) const { return block_.data() + slot * slot_bytes_; }
  std::string name(int64_t array) const { return setup_.name(array); }
  void take(int64_t array, int64_t slot);
  void settle(Slot& slot);
  void read_into_slot(const Array& a, int64_t index, int64_t slot);
  void write_from_slot(int64_t index, int64_t slot);
  void check_whole(int64_t index);
  bool read_from_disk(const Array& a, int64_t index, int64_t begin, int64_t bytes, std::byte* to);
  [[noreturn]] void fail_damaged(int64_t index, int64_t offset) const;
  // store_near.cpp
  std::byte* near_memory(int64_t slot) const { return near_.data() + slot * slot_bytes_; }
  void near_fetch(int64_t index, int64_t slot);
  void near_write_back(int64_t index);
  std::byte* near_use(int64_t index);
  void lift(int64_t slot, const std::byte* from);
  void hand_over(int64_t slot);
  void end_use(int64_t slot);
  void bring_home(int64_t index);
  void clear(int64_t slot);
  void copy(std::byte* to, const std::byte* from, int64_t index, StreamView way);
  void wait_for_arrival(int64_t index, int64_t slot);
  static uint64_t checksum(const std::byte* chunk);
  void stamp_at(const Array& a, const std::byte* bytes, int64_t begin, int64_t end);

  StoreSetup setup_;
  SwapSpace* space_;
  IoQueue* queue_;
  int64_t slot_bytes_;
  PinnedBlock block_;  // a slot each (none where nothing is on disk), then the homes in host memory
  Memory near_;        // device slots
  Stream up_, down_;   // to the device and from it
  std::vector<NearSlot> near_slots_;
  std::vector<Array> arrays_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> checksums_;  // of every chunk of every array, as last written
  double wait_seconds_ = 0;
};

}  // namespace lm
