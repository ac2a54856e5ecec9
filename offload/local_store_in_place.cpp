// The store's access to the tier's copy of an array: reads of any array wherever it is, verification of
// arrays in host memory, and a second read of chunks that came back from disk damaged, since the transfer and
// not the disk may be at fault.
#include <fmt/format.h>
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/parallel.h"
#include "offload/local_store.h"

namespace lm {
namespace {

using Buffer = std::unique_ptr<std::byte, decltype(&std::free)>;

Buffer aligned_buffer(int64_t bytes) {
  auto* const memory = static_cast<std::byte*>(
      std::aligned_alloc(static_cast<size_t>(kChecksumChunk), static_cast<size_t>(bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, &std::free};
}

}  // namespace

void LocalStore::check_host_array(int64_t index, int64_t begin, int64_t end) const {
  const Array& a = array(index);
  std::atomic<int64_t> damaged{-1};
  const int64_t first_chunk = begin / kChecksumChunk, chunks = ceil_div(end, kChecksumChunk) - first_chunk;
  parallel_for(setup_.threads, chunks, kCheckGrain, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first_chunk + first; chunk < first_chunk + last; ++chunk) {
      const int64_t offset = chunk * kChecksumChunk;
      const auto length = static_cast<size_t>(std::min(kChecksumChunk, a.bytes - offset));
      if (padded_checksum({a.host_array + offset, length}) != a.sums[chunk]) damaged = offset;
    }
  });
  if (damaged >= 0) fail_damaged(index, damaged);
}

// Verifies the array in the slot by the checksums computed on arrival. If the copy in host memory is intact,
// the transfer changed the bytes, and they are copied once more.
void LocalStore::check_what_arrived(int64_t index, int64_t slot) {
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  const Array& a = array(index);
  for (int tries = 0; std::exchange(device.unchecked, false); ++tries) {
    device.arrived.synchronize();
    const int64_t chunk = first_difference(index, slot);
    if (chunk < 0) return;
    check_host_array(index, 0, a.bytes);
    if (tries > 0) {
      fail_changed(index, chunk * kChecksumChunk,
                   {"between host memory and the GPU",
                    "check the GPU: the ECC counts of nvidia-smi -q, the system log for errors of PCIe",
                    ", copied twice"});
    }
    log_note("INT-08", fmt::format("{}: corrupted in transfer to the GPU, and copied again", name(index)));
    copy_to_device(slot, a.host_array, asked_for(index));
  }
}

// The first chunk that arrived with another checksum than it has in host memory; -1: there is none.
int64_t LocalStore::first_difference(int64_t index, int64_t slot) const {
  const Array& a = array(index);
  const uint64_t* const found = arrived_sums_ + slot * slot_sums_;
  for (int64_t chunk = 0; chunk < ceil_div(a.bytes, kChecksumChunk); ++chunk)
    if (asked_for(a, chunk) && found[chunk] != a.sums[chunk]) return chunk;
  return -1;
}

// Reads chunks from `begin` on from disk into `to`; returns whether they are intact.
bool LocalStore::read_from_disk(const Array& a, int64_t index, int64_t begin, int64_t bytes, std::byte* to) {
  const Extent part = slice(a.extent, begin, bytes);
  queue_->wait(queue_->read(part, to, bytes, name(index), {{a.written}}));
  for (int64_t offset = 0; setup_.verify && offset < bytes; offset += kChecksumChunk) {
    if (checksum(to + offset) != a.sums[(begin + offset) / kChecksumChunk]) return false;
  }
  return true;
}

bool LocalStore::reread(int64_t index, int64_t begin, int64_t end) {
  const Array& a = array(index);
  try {
    const Buffer again = aligned_buffer(kChecksumChunk);
    space_->drop_cached(slice(a.extent, begin, round_up(end - begin, kChecksumChunk)));
    for (int64_t offset = begin; offset < end; offset += kChecksumChunk) {
      if (intact(index, offset, std::min(offset + kChecksumChunk, end))) continue;
      if (!read_from_disk(a, index, offset, kChecksumChunk, again.get())) return false;
      std::memcpy(memory(a.slot) + offset, again.get(), static_cast<size_t>(kChecksumChunk));
      // Frequent read errors are logged at powers of two only.
      const uint64_t count = ++read_again_;
      if (!std::has_single_bit(count)) continue;
      log_note("INT-06",
               fmt::format("{}: checksum mismatch of the chunk at {}, correct when read again ({}{} so far)",
                           name(index), offset, count, count == 1 ? " chunk" : " chunks"));
    }
  } catch (const std::exception&) {
    return false;  // on an OpenMP thread; the caller reports the damage, and the queue its failure
  }
  return true;
}

void LocalStore::read(int64_t index, int64_t begin, std::span<std::byte> out) {
  Array& a = array(index);
  const auto bytes = std::ssize(out);
  LM_CHECK(begin >= 0 && begin + bytes <= a.bytes, name(index) + " has no such bytes");
  // What was fetched in parts is as its tier has it.
  if (a.slot >= 0 && slots_[static_cast<size_t>(a.slot)].parts.empty()) {
    copy_bytes(out.data(), use(index) + begin, bytes, setup_.stream);
    return synchronize(setup_.stream);
  }
  if (setup_.slots_on_device) finish_pending_write(index);
  if (a.fresh) return void(std::memset(out.data(), 0, out.size()));
  if (a.host_array != nullptr) {
    left(index).synchronize();
    if (setup_.verify) check_host_array(index, begin, begin + bytes);
    return void(std::memcpy(out.data(), a.host_array + begin, out.size()));
  }
  const int64_t first = begin / kChecksumChunk * kChecksumChunk,
                whole = round_up(begin + bytes, kChecksumChunk) - first;
  const Buffer chunks = aligned_buffer(whole);
  if (!read_from_disk(a, index, first, whole, chunks.get())) {
    space_->drop_cached(slice(a.extent, first, whole));
    if (!read_from_disk(a, index, first, whole, chunks.get())) fail_damaged(index, first);
  }
  std::memcpy(out.data(), chunks.get() + (begin - first), out.size());
}

void LocalStore::reset() {
  up_.synchronize();
  down_->synchronize();
  checks_.synchronize();
  for (DeviceSlot& slot : device_slots_) {
    slot.reading = slot.arriving = slot.unchecked = slot.filled_here = slot.in_use = false;
    slot.leaving = -1;
  }
  std::fill(slots_.begin(), slots_.end(), Slot{});
  for (size_t index = 0; index < arrays_.size(); ++index) {
    Array& a = arrays_[index];
    a.bytes = setup_.bytes[index];
    a.slot = -1;
    if (in_common(static_cast<int64_t>(index))) continue;  // other processes still read it
    a.left_from = -1;
    a.written = 0;
    a.fresh = true;
  }
}

}  // namespace lm
