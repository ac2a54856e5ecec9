// The store of one machine: arrays on the disk tier (swap space) or in pinned host memory. The checksum of
// every chunk of 8 KiB that is written back is kept in memory and verified before the chunk is used again.
//
// On the CPU slots are pinned host memory. On a GPU they are device memory: copies run on their own streams,
// one per direction, and transfers from and to disk are staged in host memory, slot by slot
// (local_store_device.cpp). Arrays in host memory are checksummed on the device, before they leave and after
// they arrive: a pass over them there costs a hundredth of the link's time, while a check and a stamp by 16
// cores took longer than the link.
//
// The store owns slots (leased from the pinned pool) and extents; queue and pool belong to the rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "base/device_clock.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"
#include "offload/store.h"
#include "offload/swap_space.h"

namespace lm {

struct LocalStoreSetup {
  std::vector<int64_t> bytes;                // of each array; 0: not in this store
  std::function<std::string(int64_t)> name;  // of an array, for messages: "weights of layers.3"
  int64_t slots = 0;
  bool verify = true;            // false: trust disk and host memory (offload.verify)
  int threads = 1;               // for checking and stamping whole arrays
  bool slots_on_device = false;  // slots are device memory (tests: also where the device is the CPU)
  // Per array, with slots_on_device: nonzero if it is in pinned host memory; empty: all on disk.
  std::vector<char> in_host = {};
  // Per array in host memory: nonzero if it is in `common` (common_bytes), memory of several processes, and
  // not in the pool's; empty: none. One process fills them (publish_common), the others read them
  // (adopt_common).
  std::vector<char> in_common = {};
  std::span<std::byte> common = {};
  bool fills_common = true;
  StreamView stream = {};  // on which compute uses the slots
  // For arrays in host memory: checksums bytes in the slots' memory (kernels/kernels.h has a GPU's).
  ChunkSumsKernel chunk_sums = chunk_sums_cpu;
  // Stream of copies out of the slots; null: the store makes one. Stores that share it copy in the order in
  // which compute finishes with the slots: a GPU's copy engine stays with one stream as long as that has
  // work.
  std::shared_ptr<Stream> down = {};
  DeviceClock* clock = nullptr;  // borrowed; records copies and compute's waits if slots are a GPU's
};

class LocalStore : public Store, private ChunkChecks {
 public:
  // The memory and disk space of such a store.
  static int64_t slot_bytes(const std::vector<int64_t>& array_bytes);  // of one slot
  static int64_t swap_bytes(const std::vector<int64_t>& array_bytes, const std::vector<char>& in_host = {});
  static int64_t pinned_bytes(const LocalStoreSetup& setup);
  static int64_t common_bytes(const LocalStoreSetup& setup);  // with checksums; 0: no array is there

  // `space` and `queue` may be null where nothing is on disk.
  LocalStore(LocalStoreSetup setup, SwapSpace* space, IoQueue* queue, PinnedPool& pool);
  // Nothing of the slots is in flight afterwards.
  ~LocalStore() override;
  LocalStore(const LocalStore&) = delete;
  LocalStore& operator=(const LocalStore&) = delete;

  void fetch(int64_t array, int64_t slot) override { fetch_parts(array, slot, {}); }
  // In whole chunks. No parts: all of the array.
  void fetch_parts(int64_t array, int64_t slot, std::span<const ByteRange> parts) override;
  bool fetches_parts() const override { return true; }
  int64_t bring(int64_t array, std::span<const ByteRange> parts) override;
  void allocate_slot(int64_t array, int64_t slot) override;
  void write_back(int64_t array) override;
  void forget(int64_t array) override;
  // Continues transfers: from host memory to the device, and from there to disk. A no-op if slots are host
  // memory.
  void poll() override;
  void flush() override;
  std::byte* use(int64_t array) override;
  std::byte* use_unchecked(int64_t array, Arrival* arrival) override;
  // Arrays on the way to a device are verified before.
  ChunkChecks* chunk_checks() override { return setup_.verify && !setup_.slots_on_device ? this : nullptr; }
  void read(int64_t array, int64_t begin, std::span<std::byte> out) override;
  // The queue has nothing under way.
  void reset() override;
  void resize(int64_t array, int64_t bytes) override;
  bool holds(int64_t array) const override;
  bool fills(int64_t array) const override { return setup_.fills_common || !in_common(array); }
  // Between the two all processes wait for the one that fills the arrays. publish_common: they are in their
  // memory, with their checksums, and never change again. adopt_common: this process, if it has not filled
  // them, has them as if it had.
  void publish_common();
  void adopt_common();
  bool in_slot(int64_t array) const override { return arrays_[static_cast<size_t>(array)].slot >= 0; }
  bool fresh(int64_t array) const override { return arrays_[static_cast<size_t>(array)].fresh; }
  double wait_seconds() const override { return wait_seconds_; }

 private:
  struct Array {
    Extent extent;
    int64_t bytes = 0;
    int64_t slot = -1;                // its slot, or the one it is being fetched to
    Ticket written = 0;               // its last write
    std::byte* host_array = nullptr;  // null: it is on disk
    int64_t left_from = -1;           // slot from which it was last copied to host memory
    bool fresh = true;
    uint64_t* sums = nullptr;  // its checksums
  };
  struct Slot {
    int64_t array = -1;
    Ticket read = 0, written = 0;  // the last of each
    Ticket before = 0;  // the write of what the slot held before: it must be done before the slot is filled
    Arrival arrival = Arrival::kKnown;
    bool stamped = false;  // the caller has stamped its new bytes
    bool touched = false;  // used since its arrival
    // Of an array that was fetched in parts: each of its chunks, nonzero where it was asked for. Empty: all.
    std::vector<char> parts = {};
  };
  // The device's side of a slot.
  struct DeviceSlot {
    explicit DeviceSlot(DeviceType device) : used(device), copied(device), arrived(device), left(device) {}
    Event used, copied, arrived,
        left;                  // compute is done with it; copied in; and its checksums taken; copied out
    bool reading = false;      // being read from disk into host memory
    bool arriving = false;     // being copied from there to the device
    bool unchecked = false;    // the arrived bytes are not yet verified
    int64_t leaving = -1;      // the array being copied to host memory, and then to disk
    bool filled_here = false;  // taken over by compute, not by a copy
    bool in_use = false;       // by work that may still be enqueued: `used` is yet to be recorded
  };

  // ChunkChecks
  bool intact(int64_t array, int64_t begin, int64_t end) const override;
  // The same for bytes outside the slot: `bytes` points to the array's first byte.
  bool matches(const Array& a, const std::byte* bytes, int64_t begin, int64_t end) const;
  bool reread(int64_t array, int64_t begin, int64_t end) override;
  void stamp(int64_t array, int64_t begin, int64_t end) override;
  void all_stamped(int64_t array) override { slot_of(array).stamped = true; }
  [[noreturn]] void report_damage(int64_t array) const override;

  Array& array(int64_t index);
  const Array& array(int64_t index) const;
  Slot& slot_of(int64_t array);
  int64_t bytes(int64_t array) const { return arrays_[static_cast<size_t>(array)].bytes; }
  // Host memory of a slot: the slot itself, or its staging buffer.
  std::byte* memory(int64_t slot) const { return block_.data() + slot * slot_bytes_; }
  std::string name(int64_t array) const { return setup_.name(array); }
  void take(int64_t array, int64_t slot);
  void settle(Slot& slot);
  void read_into_slot(const Array& a, int64_t index, int64_t slot);
  // local_store_parts.cpp
  std::vector<ByteRange> ask_for(int64_t index, std::span<const ByteRange> parts);
  std::vector<ByteRange> asked_for(int64_t index) const;
  bool asked_for(const Array& a, int64_t chunk) const {
    const std::vector<char>& parts = slots_[static_cast<size_t>(a.slot)].parts;
    return parts.empty() || parts[static_cast<size_t>(chunk)] != 0;
  }
  void read_now(int64_t index, const std::vector<ByteRange>& runs);
  void write_from_slot(int64_t index, int64_t slot);
  void check_arrived(int64_t index) { check_part(index, {0, bytes(index)}); }
  void check_part(int64_t index, const ByteRange& part);
  // local_store_in_place.cpp
  void check_host_array(int64_t index, int64_t begin, int64_t end) const;
  void check_what_arrived(int64_t index, int64_t slot);
  int64_t first_difference(int64_t index, int64_t slot) const;
  bool read_from_disk(const Array& a, int64_t index, int64_t begin, int64_t bytes, std::byte* to);
  struct Suspect {
    std::string place, next, tries = {};
  };
  [[noreturn]] void fail_damaged(int64_t index, int64_t offset) const;
  [[noreturn]] void fail_changed(int64_t index, int64_t offset, const Suspect& suspect) const;
  // local_store_device.cpp
  std::byte* device_memory(int64_t slot) const { return device_.data() + slot * slot_bytes_; }
  void start_to_device(int64_t index, int64_t slot);
  std::byte* use_on_device(int64_t index);
  void write_back_from_device(int64_t index);
  void copy_to_device(int64_t slot, const std::byte* from, const std::vector<ByteRange>& runs);
  void write_staged_to_disk(int64_t slot);
  void finish_pending_write(int64_t index);
  void take_sums(int64_t slot, const ByteRange& run, uint64_t* to, StreamView way);
  const Event& left(int64_t index) const {
    return device_slots_[static_cast<size_t>(array(index).left_from)].left;
  }
  void end_use(int64_t slot);
  void clear(int64_t slot);
  void copy(std::byte* to, const std::byte* from, int64_t index, const ByteRange& run, StreamView way);
  void wait_for_arrival(int64_t index, int64_t slot);
  // Calls wait(), in which compute waits for a transfer of the array. By the device's clock the wait begins
  // at the end of compute's work so far, whether the host waits now or the stream does later.
  template <class Wait>
  void stall(int64_t index, const Wait& wait) {
    if (setup_.clock == nullptr) return wait();
    const int64_t span = setup_.clock->begin(DeviceClock::Kind::kStall, setup_.stream, 0,
                                             [&] { return "wait for " + name(index); });
    wait();
    setup_.clock->end(span, setup_.stream);
  }
  // local_store_common.cpp
  bool in_common(int64_t array) const {
    return static_cast<size_t>(array) < setup_.in_common.size() &&
           setup_.in_common[static_cast<size_t>(array)] != 0;
  }
  void place_common();
  template <class Body>
  void each_in_common(const Body& body);
  bool checks_on_device(const Array& a) const { return setup_.verify && a.host_array != nullptr; }
  static uint64_t checksum(const std::byte* chunk);
  void stamp_at(const Array& a, const std::byte* bytes, int64_t begin, int64_t end);

  // In chunks: waking a thread pays from about 100 us of checking on.
  static constexpr int64_t kCheckGrain = 128;

  LocalStoreSetup setup_;
  SwapSpace* space_;
  IoQueue* queue_;
  int64_t slot_bytes_, slot_sums_;
  // One slot each (none if nothing is on disk), then the arrays in host memory but those in common, the
  // checksums of all in host memory, and per slot the checksums of the array that arrived in it.
  PinnedBlock block_;
  Memory device_;                     // the slots
  Memory device_sums_;                // staging for their checksums if the GPU cannot write to block_
  uint64_t* arrived_sums_ = nullptr;  // in block_
  Stream up_, checks_;                // copies to the device; checksums of arrived slots
  std::shared_ptr<Stream> down_;      // copies from the device
  std::vector<DeviceSlot> device_slots_;
  std::vector<Array> arrays_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> checksums_;  // of every chunk of every array on disk, as last written
  bool published_ = false;           // arrays in common change no more
  double wait_seconds_ = 0;
  std::atomic<uint64_t> read_again_{0};  // ranges that were intact at the second read
};

}  // namespace lm
