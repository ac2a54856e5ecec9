// Arrays that are fetched in parts. A slot knows which chunks of its array were asked for: those, and no
// others, are read, copied and verified. Chunks are the unit, since each has one checksum: what lies beside a
// part in its first or last chunk comes along, and is not brought again.
#include <algorithm>
#include <array>
#include <utility>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "offload/local_store.h"

namespace lm {

// Marks the chunks of these parts; returns the bytes of those that were not asked for before, as runs.
std::vector<ByteRange> LocalStore::ask_for(int64_t index, std::span<const ByteRange> parts) {
  Slot& s = slot_of(index);
  const int64_t length = bytes(index);
  std::vector<int64_t> chunks;
  for (const ByteRange& part : parts) {
    LM_CHECK(part.begin >= 0 && part.bytes >= 0 && part.end() <= length, name(index) + " has no such part");
    for (int64_t c = part.begin / kChecksumChunk; c * kChecksumChunk < part.end(); ++c)
      if (std::exchange(s.parts[static_cast<size_t>(c)], 1) == 0) chunks.push_back(c);
  }
  std::ranges::sort(chunks);
  std::vector<ByteRange> runs;
  for (const int64_t c : chunks) {
    const int64_t begin = c * kChecksumChunk, size = std::min(kChecksumChunk, length - begin);
    if (!runs.empty() && runs.back().end() == begin) {
      runs.back().bytes += size;
    } else {
      runs.push_back({begin, size});
    }
  }
  return runs;
}

// All that was asked for of the array in its slot, as runs.
std::vector<ByteRange> LocalStore::asked_for(int64_t index) const {
  const Array& a = array(index);
  if (slots_[static_cast<size_t>(a.slot)].parts.empty()) return {{0, a.bytes}};
  std::vector<ByteRange> runs;
  for (int64_t begin = 0; begin < a.bytes; begin += kChecksumChunk) {
    if (!asked_for(a, begin / kChecksumChunk)) continue;
    const int64_t size = std::min(kChecksumChunk, a.bytes - begin);
    if (!runs.empty() && runs.back().end() == begin) {
      runs.back().bytes += size;
    } else {
      runs.push_back({begin, size});
    }
  }
  return runs;
}

// From disk into the slot's host memory, beside one another. The I/O thread goes on with the other transfers
// meanwhile, and the failure of any ends the wait. What poll() would start waits until the operation is over:
// the next transfer of a slot must see all uses that the operation enqueues.
void LocalStore::read_now(int64_t index, const std::vector<ByteRange>& runs) {
  const Array& a = array(index);
  const Slot& s = slot_of(index);
  const double start = monotonic_seconds();
  const std::array<Ticket, 3> after = {s.read, s.written, a.written};
  std::vector<Ticket> tickets;
  for (const ByteRange& run : runs) {
    const int64_t whole = round_up(run.bytes, kChecksumChunk);
    tickets.push_back(queue_->read(slice(a.extent, run.begin, whole), memory(a.slot) + run.begin, whole,
                                   name(index), after));
  }
  for (const Ticket ticket : tickets) queue_->wait(ticket);
  if (setup_.clock == nullptr) wait_seconds_ += monotonic_seconds() - start;
  if (!setup_.verify) return;
  for (const ByteRange& run : runs) check_part(index, run);
}

int64_t LocalStore::bring(int64_t index, std::span<const ByteRange> parts) {
  if (slot_of(index).parts.empty()) return 0;
  use(index);  // what was asked for before has its own verification
  const std::vector<ByteRange> runs = ask_for(index, parts);
  if (runs.empty()) return 0;
  int64_t brought = 0;
  for (const ByteRange& run : runs) brought += round_up(run.bytes, kChecksumChunk);
  if (!setup_.slots_on_device) {
    read_now(index, runs);
    return brought;
  }
  stall(index, [&] {
    const Array& a = array(index);
    if (a.host_array == nullptr) read_now(index, runs);
    copy_to_device(a.slot, a.host_array != nullptr ? a.host_array : memory(a.slot), runs);
    wait_for_arrival(index, a.slot);
  });
  use(index);  // it has arrived: what compute reads from here on is a use of the slot
  return brought;
}

}  // namespace lm
