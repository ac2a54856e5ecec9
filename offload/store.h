// Offloaded arrays of state: optimizer tiles, weights, gradients, saved activations. Compute works on an
// array only while it is in one of the store's slots. The schedule (schedule/transfers.h) decides which array
// is fetched into which slot, and when, so that nothing here depends on timing.
//
// An interface, so that callers do not know where arrays live: on this machine's disks and in its host memory
// (local_store.h), or in shards on every rank. A failure is thrown by the call that needs the bytes (use), or
// by the call that notices it (any other): Error(20) no space, Error(21) a transfer, Error(22) damaged bytes.
// Called by the rank's compute thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/byte_range.h"
#include "base/checksum.h"

namespace lm {

// The state of a slot's bytes when its array is used.
enum class Arrival : uint8_t {
  kKnown,      // the bytes of its last use
  kUnchecked,  // fetched from its tier, not yet verified (ChunkChecks)
  kZeros,      // the array was never written
};

// Chunk-by-chunk verification of an array in its slot, for a caller that does it while it computes. intact
// and stamp may also be called from the compute thread's OpenMP threads, on disjoint ranges.
class ChunkChecks {
 public:
  // For bytes [begin, end), both multiples of kChecksumChunk (or the array's end). intact: whether they match
  // their checksums. stamp: takes new checksums of them for the next write_back.
  virtual bool intact(int64_t array, int64_t begin, int64_t end) const = 0;
  virtual void stamp(int64_t array, int64_t begin, int64_t end) = 0;
  // Reads the range once more from its tier, bypassing the page cache; returns whether it is intact now.
  virtual bool reread(int64_t array, int64_t begin, int64_t end) = 0;
  // Declares that every chunk has been stamped since its last change, so that write_back does not.
  virtual void all_stamped(int64_t array) = 0;
  // Throws Error(22) with the place of the first chunk that is not intact.
  [[noreturn]] virtual void report_damage(int64_t array) const = 0;

 protected:
  ~ChunkChecks() = default;
};

class Store {
 public:
  virtual ~Store() = default;

  // The schedule's transfers; none of them waits. fetch delivers zeros for an array that was never written.
  // claim allocates a slot for an array about to be written: the slot's bytes are undefined.
  virtual void fetch(int64_t array, int64_t slot) = 0;
  virtual void allocate_slot(int64_t array, int64_t slot) = 0;
  // An array that was not used since its fetch (a skipped step) equals its tier's copy: nothing is written.
  virtual void write_back(int64_t array) = 0;
  // Frees the array's slot; changes that were not written back are dropped.
  virtual void forget(int64_t array) = 0;

  // Starts the next stage of transfers whose last one is done. Never waits. Call it between operations: uses
  // of a slot have been enqueued by then, and its next transfer waits for these and nothing later.
  virtual void poll() {}
  // Waits until all write-backs have reached their tier and nothing is in flight.
  virtual void flush() = 0;

  // The array in its slot, complete and verified: waits for its fetch.
  virtual std::byte* use(int64_t array) = 0;
  // The same for a caller that verifies chunk by chunk if *arrival is kUnchecked.
  virtual std::byte* use_unchecked(int64_t array, Arrival* arrival) = 0;
  // Null if the store verifies everything: then no array arrives unchecked.
  virtual ChunkChecks* chunk_checks() { return nullptr; }

  // Copies the array's current bytes from `begin` on into host memory, wherever they are. Waits; the array
  // stays where it is.
  virtual void read(int64_t array, int64_t begin, std::span<std::byte> out) = 0;
  // After an error: nothing is in flight, every slot is empty, and every array is as if it was never written.
  virtual void reset() = 0;

  // Sets the valid length of the array (a shorter batch's activations).
  virtual void resize(int64_t array, int64_t bytes) = 0;
  virtual bool holds(int64_t array) const = 0;
  // Whether this process writes what the array begins with; false: another one does, in memory of both.
  virtual bool fills(int64_t /*array*/) const { return true; }
  // Whether it is in one of the store's slots, or on its way there.
  virtual bool in_slot(int64_t array) const = 0;
  // Whether it was never written: its bytes are meaningless zeros.
  virtual bool fresh(int64_t array) const = 0;

  // For a store of shards: this rank's shard on its tier, addressed as if the whole array were there. The
  // shard is about to change: the array's slot is freed.
  virtual std::byte* use_in_place(int64_t array) { return use(array); }

  // For the stream of the ranks' group. use_in_group: the array in its slot. used_in_group, called with that
  // work enqueued: makes the slot's next user wait for it; false if the store does not know that stream, so
  // that compute has to wait.
  virtual std::byte* use_in_group(int64_t array) { return use(array); }
  virtual bool used_in_group(int64_t /*array*/) { return false; }

  // Time that compute has waited in `use`, if no device clock counts it.
  virtual double wait_seconds() const { return 0; }

  // For an array of which compute may need a part alone (experts that no token chose), and does not write.
  // fetch_parts: as fetch, but only these bytes have to arrive; what else is in the slot is undefined. bring:
  // waits until these are there and verified, too, in the slot; returns the bytes that were not there before,
  // in whole chunks. A store without fetches_parts fetches the whole array, and has nothing to bring.
  virtual void fetch_parts(int64_t array, int64_t slot, std::span<const ByteRange> /*parts*/) {
    fetch(array, slot);
  }
  virtual bool fetches_parts() const { return false; }
  virtual int64_t bring(int64_t /*array*/, std::span<const ByteRange> /*parts*/) { return 0; }
};

}  // namespace lm
