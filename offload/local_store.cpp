#include "offload/local_store.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/parallel.h"

namespace lm {
namespace {

// Every transfer is a multiple of this: whole chunks, so that the last one is read back with its zero
// padding.
constexpr int64_t kAlignment = kChecksumChunk;

int64_t chunks_of(int64_t bytes) {
  return ceil_div(bytes, kChecksumChunk);
}

bool lives_in_host(const std::vector<char>& in_host, size_t array) {
  return array < in_host.size() && in_host[array] != 0;
}

// Total bytes of the arrays on one tier, in whole chunks.
int64_t bytes_of(const std::vector<int64_t>& array_bytes, const std::vector<char>& in_host, bool host) {
  int64_t sum = 0;
  for (size_t a = 0; a < array_bytes.size(); ++a) {
    if (lives_in_host(in_host, a) == host) sum += round_up(array_bytes[a], kAlignment);
  }
  return sum;
}

// Of the arrays in host memory, those in memory of this process alone.
int64_t own_bytes(const LocalStoreSetup& setup) {
  return bytes_of(setup.bytes, setup.in_host, true) - bytes_of(setup.bytes, setup.in_common, true);
}

// The number of adjacent checksums for so many bytes, rounded up to an even number, so that no two streams
// write to the same 16 bytes, the granularity of the order checker of the GPU emulator.
int64_t sums_of(int64_t bytes) {
  return round_up(chunks_of(bytes), 2);
}

int64_t sums_bytes(int64_t sums) {
  return sums * static_cast<int64_t>(sizeof(uint64_t));
}

// Checksums of all arrays in host memory, then of every slot.
int64_t sums_bytes(const LocalStoreSetup& setup) {
  int64_t sums = 0;
  for (size_t a = 0; a < setup.bytes.size(); ++a) {
    if (lives_in_host(setup.in_host, a)) sums += sums_of(setup.bytes[a]);
  }
  return sums == 0 ? 0 : sums_bytes(sums + setup.slots * sums_of(LocalStore::slot_bytes(setup.bytes)));
}

// Device memory for the slots' checksums: needed if arrays are in host memory and the GPU cannot write to it.
int64_t sums_to_copy(const LocalStoreSetup& setup, const PinnedPool& pool) {
  const bool in_place = setup.stream.device == DeviceType::kCpu || pool.used_in_place();
  if (in_place || bytes_of(setup.bytes, setup.in_host, true) == 0) return 0;
  return sums_bytes(sums_of(LocalStore::slot_bytes(setup.bytes)) * setup.slots);
}

}  // namespace

int64_t LocalStore::slot_bytes(const std::vector<int64_t>& array_bytes) {
  int64_t most = 0;
  for (const int64_t bytes : array_bytes) most = std::max(most, bytes);
  return round_up(most, kChecksumChunk);
}

int64_t LocalStore::swap_bytes(const std::vector<int64_t>& array_bytes, const std::vector<char>& in_host) {
  return bytes_of(array_bytes, in_host, false);
}

int64_t LocalStore::pinned_bytes(const LocalStoreSetup& setup) {
  const int64_t slots =
      swap_bytes(setup.bytes, setup.in_host) > 0 ? setup.slots * slot_bytes(setup.bytes) : 0;
  return slots + own_bytes(setup) + sums_bytes(setup);
}

LocalStore::LocalStore(LocalStoreSetup setup, SwapSpace* space, IoQueue* queue, PinnedPool& pool)
    : setup_(std::move(setup)),
      space_(space),
      queue_(queue),
      slot_bytes_(slot_bytes(setup_.bytes)),
      slot_sums_(sums_of(slot_bytes_)),
      block_(pool.lease(pinned_bytes(setup_))),
      device_(setup_.stream.device, setup_.slots_on_device ? slot_bytes_ * setup_.slots : 0),
      device_sums_(setup_.stream.device, sums_to_copy(setup_, pool)),
      up_(setup_.stream.device),
      checks_(setup_.stream.device, setup_.threads),
      down_(setup_.down != nullptr ? setup_.down : std::make_shared<Stream>(setup_.stream.device)),
      arrays_(setup_.bytes.size()),
      slots_(static_cast<size_t>(setup_.slots)) {
  const bool disk = swap_bytes(setup_.bytes, setup_.in_host) > 0;
  LM_CHECK(setup_.slots_on_device || bytes_of(setup_.bytes, setup_.in_host, true) == 0,
           "arrays in host memory need slots on the device");
  if (disk) {
    LM_CHECK(kAlignment % space->alignment() == 0,
             fmt::format("the disks want an alignment of {}", space->alignment()));
  }
  for (size_t s = 0; setup_.slots_on_device && s < slots_.size(); ++s)
    device_slots_.emplace_back(setup_.stream.device);
  checksums_.resize(static_cast<size_t>(swap_bytes(setup_.bytes, setup_.in_host) / kChecksumChunk));
  const int64_t host_bytes = own_bytes(setup_);
  std::byte* host = block_.data() + (disk ? setup_.slots * slot_bytes_ : 0);
  auto* host_sums = reinterpret_cast<uint64_t*>(host + host_bytes);
  uint64_t* disk_sums = checksums_.data();
  for (size_t a = 0; a < arrays_.size(); ++a) {
    if (setup_.bytes[a] == 0) continue;
    const int64_t whole = round_up(setup_.bytes[a], kAlignment), chunks = chunks_of(setup_.bytes[a]);
    arrays_[a].bytes = setup_.bytes[a];
    if (lives_in_host(setup_.in_host, a)) {
      if (!in_common(static_cast<int64_t>(a))) arrays_[a].host_array = std::exchange(host, host + whole);
      arrays_[a].sums = std::exchange(host_sums, host_sums + sums_of(setup_.bytes[a]));
      continue;
    }
    arrays_[a].extent = space->allocate(whole);
    arrays_[a].sums = std::exchange(disk_sums, disk_sums + chunks);
  }
  if (bytes_of(setup_.bytes, setup_.in_host, true) > 0) arrived_sums_ = host_sums;
  place_common();
}

LocalStore::~LocalStore() {
  try {
    LocalStore::flush();
  } catch (const Error&) {
    // The caller that needed the bytes got the error.
  }
  try {
    up_.synchronize();
    down_->synchronize();
    checks_.synchronize();
  } catch (const Error&) {
  }
}

void LocalStore::flush() {
  for (size_t s = 0; s < device_slots_.size(); ++s) {
    if (device_slots_[s].leaving >= 0) write_staged_to_disk(static_cast<int64_t>(s));
  }
  for (const Slot& slot : slots_) {
    if (queue_ == nullptr) continue;
    queue_->wait(slot.read);
    queue_->wait(slot.written);
  }
  // The last copies to host memory.
  up_.synchronize();
  down_->synchronize();
}

LocalStore::Array& LocalStore::array(int64_t index) {
  LM_CHECK(holds(index), "no such array");
  return arrays_[static_cast<size_t>(index)];
}

const LocalStore::Array& LocalStore::array(int64_t index) const {
  return const_cast<LocalStore*>(this)->array(index);
}

bool LocalStore::holds(int64_t array) const {
  return static_cast<size_t>(array) < setup_.bytes.size() && setup_.bytes[static_cast<size_t>(array)] > 0;
}

LocalStore::Slot& LocalStore::slot_of(int64_t index) {
  const Array& a = array(index);
  LM_CHECK(a.slot >= 0, name(index) + " is used without a slot");
  return slots_[static_cast<size_t>(a.slot)];
}

// Assigns the slot to the array.
void LocalStore::take(int64_t index, int64_t slot) {
  Array& a = array(index);
  Slot& s = slots_.at(static_cast<size_t>(slot));
  // An array that is dead by now may still be in the slot of its last use.
  if (a.slot >= 0) slots_[static_cast<size_t>(a.slot)].array = -1;
  if (s.array >= 0) arrays_[static_cast<size_t>(s.array)].slot = -1;
  s.array = index;
  s.before = s.written;
  s.touched = false;
  s.arrival = Arrival::kKnown;
  s.stamped = false;
  s.parts.clear();
  a.slot = slot;
}

void LocalStore::fetch_parts(int64_t index, int64_t slot, std::span<const ByteRange> parts) {
  if (setup_.slots_on_device) {
    finish_pending_write(index);
    clear(slot);
  }
  take(index, slot);
  const Array& a = array(index);
  Slot& s = slots_[static_cast<size_t>(slot)];
  if (a.fresh) {
    s.arrival = Arrival::kZeros;
    if (setup_.slots_on_device) device_slots_[static_cast<size_t>(slot)].filled_here = true;
    return;
  }
  if (!parts.empty()) {
    s.parts.assign(static_cast<size_t>(chunks_of(a.bytes)), 0);
    ask_for(index, parts);
  }
  setup_.slots_on_device ? start_to_device(index, slot) : read_into_slot(a, index, slot);
}

// One run after another, so that the last one's ticket is that of all.
void LocalStore::read_into_slot(const Array& a, int64_t index, int64_t slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  for (const ByteRange& run : asked_for(index)) {
    const std::array<Ticket, 3> after = {s.read, s.written, a.written};
    const int64_t bytes = round_up(run.bytes, kAlignment);
    s.read =
        queue_->read(slice(a.extent, run.begin, bytes), memory(slot) + run.begin, bytes, name(index), after);
  }
  s.before = 0;
  if (setup_.verify) s.arrival = Arrival::kUnchecked;
}

void LocalStore::allocate_slot(int64_t index, int64_t slot) {
  if (setup_.slots_on_device) {
    finish_pending_write(index);
    clear(slot);
    device_slots_[static_cast<size_t>(slot)].filled_here = true;
  }
  take(index, slot);
}

void LocalStore::write_back(int64_t index) {
  if (!slot_of(index).touched) return;
  LM_CHECK(slot_of(index).parts.empty(), name(index) + " is written, and was fetched in parts");
  LM_CHECK(!in_common(index) || (setup_.fills_common && !published_),
           name(index) + " is written, and other processes read it");
  if (setup_.slots_on_device) return write_back_from_device(index);
  write_from_slot(index, array(index).slot);
}

void LocalStore::write_from_slot(int64_t index, int64_t slot) {
  Array& a = array(index);
  Slot& s = slots_.at(static_cast<size_t>(slot));
  std::byte* const bytes = memory(slot);
  // A partial last chunk is padded with zeros, on the disk and under its checksum.
  std::memset(bytes + a.bytes, 0, static_cast<size_t>(round_up(a.bytes, kChecksumChunk) - a.bytes));
  if (!std::exchange(s.stamped, false) && setup_.verify) {
    parallel_for(setup_.threads, chunks_of(a.bytes), kCheckGrain, [&](int64_t first, int64_t last) {
      stamp_at(a, bytes, first * kChecksumChunk, std::min(last * kChecksumChunk, a.bytes));
    });
  }
  const std::array<Ticket, 2> after = {s.read, a.written};
  a.written = s.written = queue_->write(a.extent, bytes, round_up(a.bytes, kAlignment), name(index), after);
  a.fresh = false;
}

void LocalStore::forget(int64_t index) {
  Array& a = array(index);
  if (a.slot < 0) return;
  Slot& s = slots_[static_cast<size_t>(a.slot)];
  s.array = -1;
  s.arrival = Arrival::kKnown;
  s.stamped = false;
  if (setup_.slots_on_device) device_slots_[static_cast<size_t>(a.slot)].reading = false;
  a.slot = -1;
}

// Waits until the slot holds its array: its fetch is complete, and so is the write-back of its predecessor.
void LocalStore::settle(Slot& slot) {
  const double start = monotonic_seconds();
  queue_->wait(slot.read);
  queue_->wait(std::exchange(slot.before, 0));
  wait_seconds_ += monotonic_seconds() - start;
}

std::byte* LocalStore::use_unchecked(int64_t index, Arrival* arrival) {
  Slot& s = slot_of(index);
  s.touched = true;
  if (setup_.slots_on_device) {
    *arrival = s.arrival == Arrival::kZeros ? Arrival::kZeros : Arrival::kKnown;
    return use_on_device(index);
  }
  settle(s);
  *arrival = std::exchange(s.arrival, Arrival::kKnown);
  std::byte* const bytes = memory(array(index).slot);
  if (*arrival == Arrival::kZeros)
    std::memset(bytes, 0, static_cast<size_t>(round_up(this->bytes(index), kChecksumChunk)));
  return bytes;
}

std::byte* LocalStore::use(int64_t index) {
  Arrival arrival = Arrival::kKnown;
  std::byte* const bytes = use_unchecked(index, &arrival);
  if (arrival == Arrival::kUnchecked) check_arrived(index);
  return bytes;
}

// For slots in host memory: of whole chunks, those that were asked for.
void LocalStore::check_part(int64_t index, const ByteRange& part) {
  const Array& a = array(index);
  const int64_t first_chunk = part.begin / kChecksumChunk;
  // An exception must not leave an OpenMP thread: the threads only set a flag.
  std::atomic<bool> whole{true};
  parallel_for(setup_.threads, chunks_of(part.end()) - first_chunk, kCheckGrain,
               [&](int64_t first, int64_t last) {
                 for (int64_t c = first_chunk + first; c < first_chunk + last; ++c) {
                   const int64_t begin = c * kChecksumChunk, end = std::min(begin + kChecksumChunk, a.bytes);
                   if (!asked_for(a, c) || intact(index, begin, end)) continue;
                   if (!reread(index, begin, end)) whole = false;
                 }
               });
  if (!whole) report_damage(index);
}

// The last chunk is checked with its zero padding.
uint64_t LocalStore::checksum(const std::byte* chunk) {
  return chunk_checksum({chunk, static_cast<size_t>(kChecksumChunk)});
}

void LocalStore::stamp_at(const Array& a, const std::byte* bytes, int64_t begin, int64_t end) {
  for (int64_t offset = begin; offset < end; offset += kChecksumChunk)
    a.sums[offset / kChecksumChunk] = checksum(bytes + offset);
}

bool LocalStore::matches(const Array& a, const std::byte* bytes, int64_t begin, int64_t end) const {
  for (int64_t offset = begin; offset < end; offset += kChecksumChunk) {
    if (checksum(bytes + offset) != a.sums[offset / kChecksumChunk]) return false;
  }
  return true;
}

bool LocalStore::intact(int64_t index, int64_t begin, int64_t end) const {
  const Array& a = array(index);
  return matches(a, memory(a.slot), begin, end);
}

void LocalStore::stamp(int64_t index, int64_t begin, int64_t end) {
  const Array& a = array(index);
  stamp_at(a, memory(a.slot), begin, end);
}

void LocalStore::report_damage(int64_t index) const {
  const Array& a = array(index);
  int64_t offset = 0;
  while (offset + kChecksumChunk < a.bytes &&
         (!asked_for(a, offset / kChecksumChunk) || intact(index, offset, offset + kChecksumChunk)))
    offset += kChecksumChunk;
  fail_damaged(index, offset);
}

void LocalStore::fail_damaged(int64_t index, int64_t offset) const {
  const Array& a = array(index);
  if (a.host_array != nullptr)
    fail_changed(
        index, offset,
        {"host memory",
         "check this machine's memory (its ECC log, a memory test), and the link over which a GPU sent it"});
  const ExtentPiece piece = slice(a.extent, offset, kChecksumChunk).pieces.front();
  fail_changed(index, offset,
               {fmt::format("{}+{}", space_->path(piece.file), piece.offset),
                "check this disk and its log, or leave it out of offload.paths", ", read twice"});
}

void LocalStore::fail_changed(int64_t index, int64_t offset, const Suspect& suspect) const {
  throw Error(Exit::kIntegrity,
              {.area = "IO-06",
               .what = fmt::format("{}: {} bytes at {} of {} are not what was written there{}", name(index),
                                   kChecksumChunk, offset, bytes(index), suspect.tries),
               .place = suspect.place,
               .next = suspect.next,
               .kept = "nothing was computed from the damaged bytes; what was saved before is untouched, and "
                       "the run can resume from there"});
}

void LocalStore::resize(int64_t index, int64_t bytes) {
  LM_CHECK(bytes > 0 && bytes <= setup_.bytes[static_cast<size_t>(index)], name(index) + " cannot grow");
  array(index).bytes = bytes;
}

}  // namespace lm
