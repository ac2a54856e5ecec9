// The store's transfers between host memory and a GPU. Every slot of the device has its events:
//
//   fetch       disk -> host memory (a ticket)  -> device (up, after `used` and `left`)  -> `arrived`
//   use         the compute stream waits for `arrived`
//   write_back  `used` -> host memory (down) -> `left` -> checksums, disk (a ticket)
//
// Arrays in host memory skip the disk, and their checksums are computed on the device: of an array that
// leaves, on the compute stream before `used`; of one that has arrived, on a stream parallel to the next
// copy, with `arrived` recorded after them. The host compares the two before it enqueues work on the slot; it
// waits no longer than compute would, while the next transfer is in flight. The two directions overlap: a
// copy into a slot waits for the one out of it, and a copy from host memory for the last one to the same
// place. poll() does the intermediate steps, or the first call that needs them.
#include <utility>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "offload/local_store.h"

namespace lm {

// Records that every use of the slot has been enqueued.
void LocalStore::end_use(int64_t slot) {
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  if (std::exchange(device.in_use, false)) device.used.record(setup_.stream);
}

// Enqueues a copy of a part of the array; the stream has waited for both ends, where the whole array begins.
void LocalStore::copy(std::byte* to, const std::byte* from, int64_t index, const ByteRange& run,
                      StreamView way) {
  if (setup_.clock == nullptr) return copy_bytes(to + run.begin, from + run.begin, run.bytes, way);
  const bool up = way.handle == up_.view().handle;
  const auto kind = up ? DeviceClock::Kind::kToDevice : DeviceClock::Kind::kFromDevice;
  const int64_t span = setup_.clock->begin(kind, way, run.bytes, [&] { return name(index); });
  copy_bytes(to + run.begin, from + run.begin, run.bytes, way);
  setup_.clock->end(span, way);
}

// Enqueues the checksums of whole chunks in the slot, written to host memory directly: a copy would wait
// behind those of slots. `to`: where that of the first chunk of all is written.
void LocalStore::take_sums(int64_t slot, const ByteRange& run, uint64_t* to, StreamView way) {
  const int64_t first = run.begin / kChecksumChunk;
  const std::byte* const from = device_memory(slot) + run.begin;
  if (device_sums_.size() == 0) return setup_.chunk_sums({from, run.bytes, to + first}, way);
  auto* const sums = reinterpret_cast<uint64_t*>(device_sums_.data()) + slot * slot_sums_ + first;
  setup_.chunk_sums({from, run.bytes, sums}, way);
  copy_bytes(to + first, sums, ceil_div(run.bytes, kChecksumChunk) * static_cast<int64_t>(sizeof(uint64_t)),
             way);
}

// Copies these runs from host memory (staging buffer or tier) to the slot.
void LocalStore::copy_to_device(int64_t slot, const std::byte* from, const std::vector<ByteRange>& runs) {
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  const int64_t index = slots_[static_cast<size_t>(slot)].array;
  end_use(slot);
  device.used.wait(up_.view());
  device.left.wait(up_.view());
  for (const ByteRange& run : runs) copy(device_memory(slot), from, index, run, up_.view());
  device.unchecked = checks_on_device(array(index));
  if (device.unchecked) {
    device.copied.record(up_.view());
    device.copied.wait(checks_.view());
    for (const ByteRange& run : runs) take_sums(slot, run, arrived_sums_ + slot * slot_sums_, checks_.view());
  }
  device.arrived.record(device.unchecked ? checks_.view() : up_.view());
  device.reading = false;
  device.arriving = true;
}

// Starts the disk write of bytes that have left the device.
void LocalStore::write_staged_to_disk(int64_t slot) {
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  device.left.synchronize();
  write_from_slot(std::exchange(device.leaving, -1), slot);
}

// Waits until no transfer of the slot's previous array uses its host memory.
void LocalStore::clear(int64_t slot) {
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  if (device.leaving >= 0) write_staged_to_disk(slot);
  if (device.arriving) device.arrived.synchronize();
  device.reading = device.arriving = device.unchecked = device.filled_here = false;
}

// Starts a pending disk write of the array first, so that no newer write overtakes it.
void LocalStore::finish_pending_write(int64_t index) {
  for (size_t s = 0; s < device_slots_.size(); ++s) {
    if (device_slots_[s].leaving == index) write_staged_to_disk(static_cast<int64_t>(s));
  }
}

// The first stage of a fetch.
void LocalStore::start_to_device(int64_t index, int64_t slot) {
  const Array& a = array(index);
  if (a.host_array == nullptr) {
    read_into_slot(a, index, slot);
    device_slots_[static_cast<size_t>(slot)].reading = true;
  } else {
    // The event may have been recorded again for a later copy: then this one only waits a little longer.
    left(index).wait(up_.view());
    copy_to_device(slot, a.host_array, asked_for(index));
  }
}

// Work enqueued on the compute stream from here on sees the array.
void LocalStore::wait_for_arrival(int64_t index, int64_t slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  if (device.reading) {
    const double start = monotonic_seconds();
    queue_->wait(s.read);
    if (setup_.clock == nullptr) wait_seconds_ += monotonic_seconds() - start;
    if (std::exchange(s.arrival, Arrival::kKnown) == Arrival::kUnchecked) check_arrived(index);
    copy_to_device(slot, memory(slot), asked_for(index));
  }
  if (device.unchecked) check_what_arrived(index, slot);
  if (device.arriving) {
    device.arrived.wait(setup_.stream);
    // The host memory may be reused once the copy is done: clear() queries the event.
  }
  if (std::exchange(device.filled_here, false)) device.left.wait(setup_.stream);
}

std::byte* LocalStore::use_on_device(int64_t index) {
  const int64_t slot = array(index).slot;
  Slot& s = slot_of(index);
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  // An array that has already arrived is not a wait.
  const bool waits = device.reading || (device.arriving && !device.arrived.done()) || device.filled_here;
  const auto wait = [&] { wait_for_arrival(index, slot); };
  waits ? stall(index, wait) : wait();
  device.in_use = true;
  if (std::exchange(s.arrival, Arrival::kKnown) == Arrival::kZeros)
    zero_bytes(device_memory(slot), slot_bytes_, setup_.stream);
  return device_memory(slot);
}

void LocalStore::write_back_from_device(int64_t index) {
  Array& a = array(index);
  Slot& s = slot_of(index);
  const int64_t slot = a.slot;
  DeviceSlot& device = device_slots_[static_cast<size_t>(slot)];
  if (device.leaving >= 0) write_staged_to_disk(slot);
  if (checks_on_device(a)) {
    // On the stream that has just written the bytes. On the copy stream it would wait until a GEMM leaves
    // room for it, and the link with it: 2 to 5 ms on an H200, for a copy of 0.7 ms.
    take_sums(slot, {0, a.bytes}, a.sums, setup_.stream);
    device.in_use = true;
  }
  end_use(slot);
  device.used.wait(down_->view());
  a.fresh = false;
  if (a.host_array != nullptr) {
    copy(a.host_array, device_memory(slot), index, {0, a.bytes}, down_->view());
    a.left_from = slot;
  } else {
    // An earlier write from the same host memory; or a read whose array was never used.
    queue_->wait(s.written);
    queue_->wait(s.read);
    copy(memory(slot), device_memory(slot), index, {0, a.bytes}, down_->view());
    device.leaving = index;
  }
  device.left.record(down_->view());
}

void LocalStore::poll() {
  for (size_t s = 0; s < device_slots_.size(); ++s) {
    DeviceSlot& device = device_slots_[s];
    const auto slot = static_cast<int64_t>(s);
    end_use(slot);
    if (device.leaving >= 0 && device.left.done()) write_staged_to_disk(slot);
    if (!device.reading || !queue_->done(slots_[s].read)) continue;
    queue_->wait(slots_[s].read);  // reports a failure
    const int64_t index = slots_[s].array;
    if (std::exchange(slots_[s].arrival, Arrival::kKnown) == Arrival::kUnchecked) check_arrived(index);
    copy_to_device(slot, memory(slot), asked_for(index));
  }
}

}  // namespace lm
