// The store of one machine: arrays at home in swap space or in pinned host memory. Every chunk of 8 KiB that
// goes home has its checksum kept in memory, and is compared with it before it is used again.
//
// On the CPU slots are pinned host memory. On a GPU they are device memory: copies run on streams of their
// own, one each way, and what comes from disk or goes there is staged in host memory, slot for slot
// (local_store_device.cpp). What lives in host memory has its checksums taken on the device, before it leaves
// and after it has come: there a pass over it costs a hundredth of what the link takes, and with 16 cores a
// check and a stamp took longer than the link.
//
// The store owns slots (leased from the pinned pool) and extents; queue and pool belong to the rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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
  int threads = 1;               // that check and stamp whole arrays
  bool slots_on_device = false;  // slots are device memory (tests: also where the device is the CPU)
  // Per array, with slots_on_device: home is pinned host memory; empty: all on disk.
  std::vector<char> in_host = {};
  StreamView stream = {};  // that compute uses the slots on
  // With homes in host memory: of bytes in the slots' memory (kernels/kernels.h has a GPU's).
  ChunkSumsKernel chunk_sums = chunk_sums_cpu;
  // That copies leave the slots on; null: one of its own. Stores that share it send in the order in which
  // compute is done with the slots: a GPU's copy engine stays with one stream as long as that has work.
  std::shared_ptr<Stream> down = {};
  DeviceClock* clock = nullptr;  // borrowed; told of copies and of compute's waits, where slots are a GPU's
};

class LocalStore : public Store, private ChunkChecks {
 public:
  // Memory and disk that such a store takes.
  static int64_t slot_bytes(const std::vector<int64_t>& array_bytes);  // of one slot
  static int64_t swap_bytes(const std::vector<int64_t>& array_bytes, const std::vector<char>& in_host = {});
  static int64_t pinned_bytes(const LocalStoreSetup& setup);

  // `space` and `queue` may be null where nothing is on disk.
  LocalStore(LocalStoreSetup setup, SwapSpace* space, IoQueue* queue, PinnedPool& pool);
  // Nothing of the slots is in flight afterwards.
  ~LocalStore() override;
  LocalStore(const LocalStore&) = delete;
  LocalStore& operator=(const LocalStore&) = delete;

  void fetch(int64_t array, int64_t slot) override;
  void claim(int64_t array, int64_t slot) override;
  void write_back(int64_t array) override;
  void forget(int64_t array) override;
  // From host memory to the device, from there to disk. Does nothing where slots are host memory.
  void poll() override;
  void flush() override;
  std::byte* use(int64_t array) override;
  std::byte* use_unchecked(int64_t array, Arrival* arrival) override;
  // What goes to a device is compared before.
  ChunkChecks* chunk_checks() override { return setup_.verify && !setup_.slots_on_device ? this : nullptr; }
  void read(int64_t array, int64_t begin, std::span<std::byte> out) override;
  // The queue has nothing under way.
  void reset() override;
  void resize(int64_t array, int64_t bytes) override;
  bool holds(int64_t array) const override;
  bool fresh(int64_t array) const override { return arrays_[static_cast<size_t>(array)].fresh; }
  double wait_seconds() const override { return wait_seconds_; }

 private:
  struct Array {
    Extent extent;
    int64_t bytes = 0;
    int64_t slot = -1;               // where it lies, or is on its way to
    Ticket written = 0;              // its last write
    std::byte* host_home = nullptr;  // null: its home is the disk
    int64_t left_from = -1;          // slot from which it last went to its home in host memory
    bool fresh = true;
    uint64_t* sums = nullptr;  // its checksums
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
  struct DeviceSlot {
    explicit DeviceSlot(DeviceType device) : used(device), copied(device), arrived(device), left(device) {}
    Event used, copied, arrived,
        left;                  // compute is done with it; copied in; and its checksums taken; copied out
    bool reading = false;      // its bytes are on their way from disk to host memory
    bool arriving = false;     // and from there to the device
    bool unchecked = false;    // what arrives is yet to be compared with what left
    int64_t leaving = -1;      // the array whose bytes are on their way to host memory, and then to disk
    bool filled_here = false;  // taken over by compute, not by a copy
    bool in_use = false;       // by work that may still be enqueued: `used` is yet to be recorded
  };

  // ChunkChecks
  bool intact(int64_t array, int64_t begin, int64_t end) const override;
  // The same of bytes that lie elsewhere: `bytes` is the array's first.
  bool matches(const Array& a, const std::byte* bytes, int64_t begin, int64_t end) const;
  bool reread(int64_t array, int64_t begin, int64_t end) override;
  void stamp(int64_t array, int64_t begin, int64_t end) override;
  void all_stamped(int64_t array) override { slot_of(array).stamped = true; }
  [[noreturn]] void report_damage(int64_t array) const override;

  Array& array(int64_t index);
  const Array& array(int64_t index) const;
  Slot& slot_of(int64_t array);
  int64_t bytes(int64_t array) const { return arrays_[static_cast<size_t>(array)].bytes; }
  // Host memory of a slot: itself, or where it is staged.
  std::byte* memory(int64_t slot) const { return block_.data() + slot * slot_bytes_; }
  std::string name(int64_t array) const { return setup_.name(array); }
  void take(int64_t array, int64_t slot);
  void settle(Slot& slot);
  void read_into_slot(const Array& a, int64_t index, int64_t slot);
  void write_from_slot(int64_t index, int64_t slot);
  void check_whole(int64_t index);
  // local_store_home.cpp
  void check_host_home(int64_t index, int64_t begin, int64_t end) const;
  void check_what_arrived(int64_t index, int64_t slot);
  bool read_from_disk(const Array& a, int64_t index, int64_t begin, int64_t bytes, std::byte* to);
  struct Suspect {
    std::string place, next, tries = {};
  };
  [[noreturn]] void fail_damaged(int64_t index, int64_t offset) const;
  [[noreturn]] void fail_changed(int64_t index, int64_t offset, const Suspect& suspect) const;
  // local_store_device.cpp
  std::byte* device_memory(int64_t slot) const { return device_.data() + slot * slot_bytes_; }
  void fetch_to_device(int64_t index, int64_t slot);
  std::byte* use_on_device(int64_t index);
  void write_back_from_device(int64_t index);
  void copy_to_device(int64_t slot, const std::byte* from);
  void write_staged_to_disk(int64_t slot);
  void finish_pending_write(int64_t index);
  void take_sums(int64_t slot, uint64_t* to, StreamView way);
  const Event& left(int64_t index) const {
    return device_slots_[static_cast<size_t>(array(index).left_from)].left;
  }
  void end_use(int64_t slot);
  void clear(int64_t slot);
  void copy(std::byte* to, const std::byte* from, int64_t index, StreamView way);
  void wait_for_arrival(int64_t index, int64_t slot);
  bool checks_on_device(const Array& a) const { return setup_.verify && a.host_home != nullptr; }
  static uint64_t checksum(const std::byte* chunk);
  void stamp_at(const Array& a, const std::byte* bytes, int64_t begin, int64_t end);

  // Chunks: a thread should have some 100 us of checking to do before it is worth waking.
  static constexpr int64_t kCheckGrain = 128;

  LocalStoreSetup setup_;
  SwapSpace* space_;
  IoQueue* queue_;
  int64_t slot_bytes_, slot_sums_;
  // A slot each (none where nothing is on disk), then the homes in host memory, their checksums, and for each
  // slot those of what has come into it.
  PinnedBlock block_;
  Memory device_;                     // slots there
  Memory device_sums_;                // their checksums on the way, where the GPU cannot write to block_
  uint64_t* arrived_sums_ = nullptr;  // in block_
  Stream up_, checks_;                // to the device; over what has come
  std::shared_ptr<Stream> down_;      // and from it
  std::vector<DeviceSlot> device_slots_;
  std::vector<Array> arrays_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> checksums_;  // of every chunk of every array at home on disk, as last written
  double wait_seconds_ = 0;
  std::atomic<uint64_t> read_again_{0};  // ranges that were right the second time
};

}  // namespace lm
