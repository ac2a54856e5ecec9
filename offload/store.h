// Arrays of state that live off the device: optimizer tiles, weights, gradients, saved activations. Compute
// works on an array only while it lies in one of the store's slots; which array comes into which slot, and
// when, is decided by the schedule (schedule/transfers.h), so that nothing here depends on timing.
//
// An interface, so that callers do not know where arrays live: on this machine's disks and in its host memory
// (local_store.h), or in shards on every rank. What fails throws where its bytes are asked for (use), or
// where it is noticed (any other call): Error(20) no space, Error(21) a transfer, Error(22) damaged bytes.
// The rank's compute thread calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/checksum.h"

namespace lm {

// What a slot holds when its array is used.
enum class Arrival : uint8_t {
  kKnown,      // what was there at its last use
  kUnchecked,  // what came from its home, not yet compared with what was written (ChunkChecks)
  kZeros,      // the array was never written
};

// The comparison of an array in its slot, for a caller that makes it piece by piece while it works. intact
// and stamp may also be called from the compute thread's OpenMP threads, on disjoint ranges.
class ChunkChecks {
 public:
  // Bytes [begin, end), both multiples of kChecksumChunk (or the array's end): whether they are what was
  // written; and that they are, as they are now, what the next write_back writes.
  virtual bool intact(int64_t array, int64_t begin, int64_t end) const = 0;
  virtual void stamp(int64_t array, int64_t begin, int64_t end) = 0;
  // Brings the range once more from its home, past what the system keeps of it: whether it is intact now.
  virtual bool reread(int64_t array, int64_t begin, int64_t end) = 0;
  // Every chunk has been stamped since its last change, so that write_back need not.
  virtual void all_stamped(int64_t array) = 0;
  // Throws Error(22) with the place of the first chunk that is not intact.
  [[noreturn]] virtual void report_damage(int64_t array) const = 0;

 protected:
  ~ChunkChecks() = default;
};

class Store {
 public:
  virtual ~Store() = default;

  // The schedule's transfers; none of them waits. An array that was never written comes as zeros. Claimed is
  // one whose bytes are about to be made: the slot has whatever was there before.
  virtual void fetch(int64_t array, int64_t slot) = 0;
  virtual void claim(int64_t array, int64_t slot) = 0;
  // An array that was fetched and not used since (a skipped step) is what its home has: nothing is written.
  virtual void write_back(int64_t array) = 0;
  // The array leaves its slot; what was not written back is dropped.
  virtual void forget(int64_t array) = 0;

  // Lets what has arrived go on its way. Never waits; to be called between operations: what was used has been
  // enqueued by then, and the slot's next transfer waits for that and for nothing later.
  virtual void poll() {}
  // Waits until what was written back is at its home and nothing is under way.
  virtual void flush() = 0;

  // The array in its slot, complete and compared with what was written: waits for its fetch.
  virtual std::byte* use(int64_t array) = 0;
  // The same for a caller that compares chunk by chunk, where *arrival says that this is due.
  virtual std::byte* use_unchecked(int64_t array, Arrival* arrival) = 0;
  // Null where nothing is left to a caller: then no array arrives unchecked.
  virtual ChunkChecks* chunk_checks() { return nullptr; }

  // Bytes of the array from `begin` on as they are now, wherever it is, into host memory. Waits; it stays
  // where it is.
  virtual void read(int64_t array, int64_t begin, std::span<std::byte> out) = 0;
  // After an error: nothing is under way, every slot is empty, and every array is as if it was never written.
  virtual void reset() = 0;

  // From now on only the first `bytes` of the array count (a shorter batch's activations).
  virtual void resize(int64_t array, int64_t bytes) = 0;
  virtual bool holds(int64_t array) const = 0;
  // Never written so far, so that its bytes are zeros without meaning.
  virtual bool fresh(int64_t array) const = 0;

  // Of a store of shards: this rank's where it lives, as if all of the array lay around it. It is about to
  // change: the array leaves its slot.
  virtual std::byte* use_home(int64_t array) { return use(array); }

  // For the stream of the ranks' group: the array in its slot; then, with that work enqueued, that the slot's
  // next user waits for it. False where the store does not know that stream, so that compute has to wait.
  virtual std::byte* use_in_group(int64_t array) { return use(array); }
  virtual bool used_in_group(int64_t /*array*/) { return false; }

  // That compute has waited in `use`, where no clock of the device counts it.
  virtual double wait_seconds() const { return 0; }
};

}  // namespace lm
